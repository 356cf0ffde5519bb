"""The number format of a training without a GPU, where a recipe leaves it to the processor.

PyTorch multiplies matrices in bfloat16 with oneDNN, which can do so from AVX-512 on. On any other
processor a plain loop does it, which took about 100 times as long as float32: 1.1 against 118
GFLOPS on two cores of an AMD EPYC with AVX2.

Relies on `torch.ops.mkldnn._is_mkldnn_bf16_supported` of torch 2.13, by which torch itself chooses
between the two. Where a torch lacks it, `auto` is float32.
"""

from typing import Any

import torch
from omegaconf import OmegaConf, open_dict

AUTO = "auto"
# FSDP's name of a number format, and the rollout's name of the same.
FLOAT32 = ("fp32", "float32")
BFLOAT16 = ("bf16", "bfloat16")
TRAINED_KEYS = (
    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype",
    "actor_rollout_ref.ref.fsdp_config.mixed_precision.param_dtype",
)
ROLLOUT_KEY = "actor_rollout_ref.rollout.dtype"
# Why float32 is taken, for messages.
NO_FAST_BFLOAT16 = (
    "this processor has no AVX-512 or its like, so that bfloat16 takes PyTorch about 100 times as "
    "long as float32"
)


def choose(config: Any) -> str | None:
    """Put the number format that "auto" stands for into verl's configuration; say which, and why.

    On a GPU nothing is changed: there, "auto" of the rollout is a value of vLLM's own.
    """
    keys = [key for key in (*TRAINED_KEYS, ROLLOUT_KEY) if OmegaConf.select(config, key) == AUTO]
    if config.trainer.device != "cpu" or not keys:
        return None
    if has_fast_bfloat16():
        trained, rolled_out = BFLOAT16
        reason = "this processor multiplies bfloat16 fast"
    else:
        trained, rolled_out = FLOAT32
        reason = NO_FAST_BFLOAT16
    with open_dict(config):
        for key in keys:
            OmegaConf.update(config, key, rolled_out if key == ROLLOUT_KEY else trained)
    return f"numbers: {rolled_out}, since {reason}"


def has_fast_bfloat16() -> bool:
    """Whether this processor multiplies matrices of bfloat16 as fast as those of float32."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
