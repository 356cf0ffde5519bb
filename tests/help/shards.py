"""A checkpoint as verl's FSDP engine saves it from one rank, without the engine."""

import json
import shutil

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM


def save_shards(model, actor, *, noise=0.0):
    """Save the weights of a Hugging Face folder, each with `noise` added; return them."""
    (actor / "huggingface").mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, actor / "huggingface")
    # as verl does with a key of `override_config`; this one is not installed here
    file = actor / "huggingface" / "config.json"
    config = {**json.loads(file.read_text()), "attn_implementation": "flash_attention_2"}
    file.write_text(json.dumps(config))
    weights = {
        name: weight + noise
        for name, weight in AutoModelForCausalLM.from_pretrained(model).state_dict().items()
    }
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        shards = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in weights.items()}
        torch.save(shards, actor / "model_world_size_1_rank_0.pt")
    finally:
        distributed.destroy_process_group()
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    return weights
