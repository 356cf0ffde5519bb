"""Checks what a run needs on this machine: the device, a folder for Ray, and a local model."""

import os
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_gdpo.rewards import TASK_OF
from verl_gdpo.rewards.sandbox_service import Service
from verl_gdpo.tools.check.gpu_memory import (
    memory_problems,
    needed_disk_gb,
    needed_gb,
    shape_of,
)
from verl_gdpo.tools.check.gpus import LEAST_DISK_GB, find_gpus, missing


def check_device(device: str) -> None:
    """Raise ValueError if verl would not find the device."""
    platform = os.environ.get("VERL_PLATFORM", "")
    if device == "cpu" and platform.strip().lower() != "cpu":
        raise ValueError(
            f"trainer.device=cpu with VERL_PLATFORM={platform!r} in the environment: verl "
            "would look for a GPU. Start with VERL_PLATFORM=cpu; no recipe can set it, because "
            "verl reads it while Python starts"
        )
    if device == "cpu" and "verl_gdpo.cpu.plugin" not in sys.modules:
        raise ValueError(
            "trainer.device=cpu: verl did not load the plugin verl_gdpo_cpu. Name it in "
            f"VERL_USE_EXTERNAL_PLUGINS={os.environ.get('VERL_USE_EXTERNAL_PLUGINS')}"
        )


def check_gpus(config: Any) -> list[str]:
    """What is said of the GPUs that a run on `trainer.device=cuda` would use.

    Raises:
        ValueError: there are too few, they are too small, or the machine lacks what they need.
    """
    if config.trainer.device != "cuda":
        return []
    import torch

    wanted, found = config.trainer.n_gpus_per_node, torch.cuda.device_count()
    if found < wanted:
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is without CUDA)"
        raise ValueError(
            f"trainer.n_gpus_per_node={wanted}, but {found} GPUs are here{build}. Without a GPU: "
            "hardware=cpu and VERL_PLATFORM=cpu. If the run will be on another machine: --elsewhere"
        )
    run_dir = Path(str(config.trainer.default_local_dir)).resolve()
    there = next(folder for folder in (run_dir, *run_dir.parents) if folder.is_dir())
    shape = shape_of(str(config.actor_rollout_ref.model.path))
    disk_gb = needed_disk_gb(shape) if shape else LEAST_DISK_GB
    problems = missing(find_gpus(os.environ), there, disk_gb)
    gpu_gb = min(torch.cuda.get_device_properties(i).total_memory for i in range(wanted)) / 1e9
    remark = f"{found} GPUs of {gpu_gb:.0f} GB"
    if shape is None:
        remark += "; the model is not here yet, so what it needs of them is not known"
    else:
        needed = needed_gb(shape, config, gpu_gb)
        problems += memory_problems(needed, gpu_gb)
        phases = ", ".join(f"{gb:.0f} GB in the {phase}" for phase, gb in needed.items())
        remark += f"; {shape.parameters / 1e9:.2f} B parameters need about {phases} (computed)"
    if problems:
        raise ValueError("; ".join(problems))
    return [remark]


def missing_packages(config: Any) -> list[str]:
    """What the engines of a run on GPUs cannot import here, a sentence each.

    Relies on verl 0.9's `HFModelConfig`, which takes flash_attention_2 where nothing is said, and
    on transformers 5, which takes the package `kernels` in the place of flash-attn.
    """
    if config.trainer.device != "cuda":
        return []
    problems = []
    engine = str(config.actor_rollout_ref.rollout.name)
    if engine in ("vllm", "sglang") and find_spec(engine) is None:
        problems.append(
            f"actor_rollout_ref.rollout.name={engine}: {engine} is not installed here. "
            "`./setup_env.sh gpu` and `pip install 'verl-gdpo[gpu]'` bring vllm"
        )
    model = config.actor_rollout_ref.model
    attention = model.override_config.get("attn_implementation", "flash_attention_2")
    if attention == "flash_attention_2" and not (find_spec("flash_attn") or find_spec("kernels")):
        problems.append(
            "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 (verl's "
            "default): flash-attn is not installed here. attention=sdpa of our recipes does not "
            "need it; `./setup_env.sh gpu flash-attn` brings it"
        )
    return problems


def check_temporary_folder() -> None:
    """Raise ValueError if Ray's workers would not start; Ray only reports that in its own logs.

    Relies on Ray 2.60's `RayParams`: "temp_dir must not be child directory of virtualenv root".
    """
    folder = Path(tempfile.gettempdir()).resolve()
    if sys.prefix != sys.base_prefix and folder.is_relative_to(Path(sys.prefix).resolve()):
        raise ValueError(
            f"TMPDIR={folder} is inside the virtual environment {sys.prefix}, where Ray starts no "
            "worker. Set TMPDIR=/tmp"
        )


def check_model(config: Any) -> None:
    """Raise ValueError if the model is a folder that does not exist; verl checks names on a hub."""
    path = str(config.actor_rollout_ref.model.path)
    folder = Path(path)
    beginnings = (config.get("data_dir") or "/", "/", ".", "~")
    is_folder = path.startswith(tuple(str(text) for text in beginnings))
    if is_folder and not (folder.expanduser() / "config.json").is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path={path}: no model is there (no config.json). Name the "
            "folder of a model, or one of a hub such as Qwen/Qwen2.5-1.5B-Instruct; the tiny "
            f"policy of the run without a GPU is made by: python -m verl_gdpo.cpu.warm_start "
            f"--out {path}"
        )


def what_scorers_miss(config: Any, sources: Iterable[str]) -> list[str]:
    """What our scorers of these data sources cannot have here.

    Raises:
        OSError: one cannot score, here or in the service of `reward.sandbox_fusion`.
        ValueError: that block cannot be meant.
    """
    if config.reward.custom_reward_function.path is not None:
        return []
    service = Service.of(config.reward.get("sandbox_fusion"))
    tasks = {task.name: task for task in map(TASK_OF.get, sources) if task is not None}
    return [
        f"task {name}: {lack}"
        for name, task in tasks.items()
        for lack in (service if service and task.takes_service else task).missing()
    ]
