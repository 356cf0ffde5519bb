"""One rank of `test_attention.py`: python fused_rank.py FOLDER"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import verl  # noqa: F401
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, Qwen2Config
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.fsdp_utils import apply_fsdp2

RANK, FOLDER = os.environ["RANK"], Path(sys.argv[1])
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def plain_model(name):
    """A model with its log-probabilities and gradients, before verl patches its class."""
    torch.manual_seed(0)
    config = Qwen2Config(**SIZES, **HEADS, tie_word_embeddings=name == "tied")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    if name == "lora":
        lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, lora)
    logits = model(IDS).logits[:, :-1]
    plain = logits.log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    plain.pow(2).sum().backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = {name: p.grad.clone() for name, p in trained}
    model.zero_grad()
    return model, plain, gradients


def worst_difference(model, plain, gradients):
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.verl_gdpo_head_in_root = True  # as `build_with_ours` leaves it where a run asks
    apply_monkey_patch(
        base, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend="torch"
    )
    mesh = init_device_mesh("cpu", (2,))
    fsdp = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(), "reshard_after_forward": True}
    apply_fsdp2(model, fsdp, {})
    worst = []
    for _ in range(2):  # the reference's pass, and then the update's
        for with_gradient in (False, True):
            with torch.set_grad_enabled(with_gradient):
                out = model(input_ids=IDS, use_cache=False, temperature=1.0, return_dict=True)
            fused = out.log_probs[:, :-1]
            worst.append((fused - plain).abs().max())
            if with_gradient:
                fused.pow(2).sum().backward()
                for name, p in model.named_parameters():
                    if name not in gradients:
                        continue
                    scale = gradients[name].abs().max()
                    worst.append((p.grad.full_tensor() - gradients[name]).abs().max() / scale)
                model.zero_grad()
    return float(max(worst))


torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(1)
IDS = torch.randint(0, 64, (3, 9))
made = {name: plain_model(name) for name in ("tied", "untied", "lora")}
for name, parts in made.items():
    (FOLDER / f"{name}-{RANK}.txt").write_text(str(worst_difference(*parts)))
dist.barrier()
dist.destroy_process_group()
