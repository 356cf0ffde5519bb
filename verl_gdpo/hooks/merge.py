"""Merges a checkpoint of verl's FSDP engine into a Hugging Face folder, in the precision it has.

python -m verl_gdpo.hooks.merge CHECKPOINT TARGET

CHECKPOINT is a folder `global_step_N/actor`. `verl-gdpo evaluate` starts this in a process of its
own, because the shards and the merged weights are in memory together.

Relies on verl 0.9 `verl.model_merger`: `FSDPModelMerger` casts every tensor with `bfloat16()` while
it joins the shards, and names bfloat16 in config.json. A run in float32 would be read in another
precision than it was trained in. What is written here is compared with the shards.
"""

import json
import sys
from pathlib import Path
from shutil import rmtree
from unittest.mock import patch

import torch


def merge(checkpoint: Path, target: Path) -> None:
    """Write the model and its tokenizer to the folder `target`.

    An adapter (LoRA) is added to the weights that it belongs to.

    Raises:
        ValueError: the weights have another precision than the shards.
    """
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(checkpoint),
        target_dir=str(target),
        hf_model_config_path=str(checkpoint / "huggingface"),
    )
    merger = FSDPModelMerger(config)
    merger.model_config._attn_implementation = None  # the run's may not be here, as flash-attn
    with patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        merger.merge_and_save()
    dtype = _dtype_of(checkpoint)
    _name_dtype(target / "config.json", dtype)
    adapter = target / "lora_adapter"
    if adapter.is_dir():
        _add_adapter(target, adapter, dtype)
    _compare(target, dtype)


def _dtype_of(checkpoint: Path) -> torch.dtype:
    """The precision of the shards."""
    shard = next(iter(sorted(checkpoint.glob("model_world_size_*_rank_0.pt"))))
    weights = torch.load(shard, map_location="cpu", weights_only=False, mmap=True)
    return next(iter(weights.values())).dtype  # type: ignore[no-any-return]


def _name_dtype(path: Path, dtype: torch.dtype) -> None:
    """Let a model's config.json name the precision of its weights."""
    config = json.loads(path.read_text())
    config.pop("torch_dtype", None)  # the name before transformers 5
    path.write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2))


def _add_adapter(target: Path, adapter: Path, dtype: torch.dtype) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(target, dtype=dtype)
    merged = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.save_pretrained(target)
    rmtree(adapter)


def _compare(target: Path, dtype: torch.dtype) -> None:
    from safetensors import safe_open

    for path in target.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no dict
                precision = file.get_tensor(name).dtype
                if precision != dtype:
                    raise ValueError(
                        f"{path}: {name} is {precision}, and {dtype} in the checkpoint: this "
                        "version of verl casts it in a way that verl-gdpo does not know"
                    )


if __name__ == "__main__":
    merge(Path(sys.argv[1]), Path(sys.argv[2]))
