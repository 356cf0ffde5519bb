"""What a run on GPUs needs of this machine, as torch sees it, and whether its keys are those."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from verl_gdpo.tools.check.gpus import (
    CARDS_GB,
    GO_ON,
    KEYS,
    LEAST_DISK_GB,
    TOKENS,
    Gpu,
    keys_for,
    missing,
)

SHARED_MEMORY_GB = 0.5  # of a vLLM server, in /dev/shm


def check_gpus(config: Any) -> list[str]:
    """Remarks about the GPUs of a run on `trainer.device=cuda`; the first one counts them.

    Raises:
        ValueError: there are too few, or the machine lacks what they need.
    """
    if config.trainer.device != "cuda":
        return []
    wanted, count = config.trainer.n_gpus_per_node, torch.cuda.device_count()
    if count < wanted:
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is without CUDA)"
        raise ValueError(
            f"trainer.n_gpus_per_node={wanted}, but {count} GPUs are here{build}. If the run will "
            "be on another machine: --elsewhere. Our recipes run without a GPU: hardware=cpu and "
            "VERL_PLATFORM=cpu"
        )
    is_fsdp = str(config.actor_rollout_ref.actor.strategy).startswith("fsdp")
    billions = billions_in(str(config.actor_rollout_ref.model.path)) if is_fsdp else None
    properties = [torch.cuda.get_device_properties(i) for i in range(wanted)]
    gpus = [
        Gpu(str(i), "", gpu.name, gpu.total_memory >> 20, "", (gpu.major, gpu.minor))
        for i, gpu in enumerate(properties)
    ]
    folder = first_that_exists(Path(str(config.trainer.default_local_dir)))
    # the environment, the weights, and two checkpoints: parameters and Adam's state in float32
    disk_gb = 15 + (2 + 2 * 12) * billions if billions else LEAST_DISK_GB
    problems = missing(gpus, folder, disk_gb) + small_shared_memory(config)
    if problems and not os.environ.get(GO_ON):
        raise ValueError(f"{'; '.join(problems)}. {GO_ON}=1 goes on all the same")
    smallest = min(gpu.total_memory for gpu in properties)
    doubts = what_may_not_fit(config, billions, smallest) if billions else []
    return [f"{count} GPUs of {smallest / 1e9:.0f} GB", *doubts, *problems]


def billions_in(path: str) -> float | None:
    """Billions of parameters of a language model on this machine; None if it is not there."""
    if (config := model_config(path)) is None:
        return None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:  # of pictures too
        return None
    return float(sum(p.numel() for p in model.parameters()) / 1e9)


def model_config(path: str) -> Any:
    """The configuration of a model in a folder or in the hub's cache; None if it is not there."""
    place = str(Path(path).expanduser())
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):  # also of a model with code of its own
        return None


def what_may_not_fit(config: Any, billions: float, gpu_bytes: int) -> list[str]:
    """A sentence where the table has no such machine, or keys that ask for less memory."""
    if config.actor_rollout_ref.model.lora_rank > 0:  # its own states are small
        return []
    count = config.trainer.n_gpus_per_node * config.trainer.nnodes
    size = f"{billions:.2f} B parameters on {count} x {gpu_bytes / 1e9:.0f} GB"
    if billions > 1.05 * max(KEYS) or gpu_bytes < 0.9e9 * min(CARDS_GB):
        return [
            f"{size}: the table of keys has models up to {max(KEYS)} B parameters, and GPUs from "
            f"{min(CARDS_GB)} GB on; recipes/README.md says what each key of memory does"
        ]
    keys = larger_than(keys_for(billions, count, gpu_bytes >> 20).overrides(), config)
    return [f"{size} may not fit (no GPU has confirmed it). With less memory: {keys}"] * bool(keys)


def larger_than(keys: Mapping[str, Any], config: Any) -> str:
    """Return those of these overrides that ask for less memory of a GPU than the configuration."""
    actor, data = config.actor_rollout_ref.actor, config.data
    values = {key: OmegaConf.select(config, key) for key in keys}
    if not actor.use_dynamic_bsz:
        longest = int(data.max_prompt_length + data.max_response_length)
        values[TOKENS] = longest * (actor.ppo_micro_batch_size_per_gpu or 1)
    # what is away from the GPU is True, and the others are limits
    return " ".join(
        f"{key}={value}"
        for key, value in keys.items()
        if (value and not values[key] if isinstance(value, bool) else values[key] > value)
    )


def small_shared_memory(config: Any) -> list[str]:
    """A sentence if /dev/shm is too small."""
    rollout, shared = config.actor_rollout_ref.rollout, Path("/dev/shm")
    if OmegaConf.select(rollout, "name") != "vllm" or not shared.is_dir():
        return []
    free_gb = shutil.disk_usage(shared).free / 1e9
    needed_gb = SHARED_MEMORY_GB * config.trainer.n_gpus_per_node
    needed_gb /= rollout.tensor_model_parallel_size
    if free_gb >= needed_gb:
        return []
    return [
        f"{shared}: {free_gb:.2f} GB free; expected at least {needed_gb:.1f} for "
        "vLLM. In a container: --shm-size=16g, or --ipc=host"
    ]


def first_that_exists(path: Path) -> Path:
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())
