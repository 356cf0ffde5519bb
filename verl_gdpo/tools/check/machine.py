"""What a run needs of this machine: the device, a place for Ray, the model if it is a folder."""

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verl_gdpo.rewards import TASK_OF


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


def check_temporary_folder() -> None:
    """Raise ValueError where no worker of Ray would start, which Ray says in its logs alone.

    Relies on Ray 2.60's `RayParams`: "temp_dir must not be child directory of virtualenv root".
    """
    folder = Path(tempfile.gettempdir()).resolve()
    if sys.prefix != sys.base_prefix and folder.is_relative_to(Path(sys.prefix).resolve()):
        raise ValueError(
            f"TMPDIR={folder} is inside the virtual environment {sys.prefix}, where Ray starts no "
            "worker. Set TMPDIR=/tmp"
        )


def check_model(config: Any) -> None:
    """Raise ValueError if the model is a folder that is not there; a hub's name is left to verl."""
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
    """What our scorers of these data sources cannot have here; OSError if one cannot score."""
    if config.reward.custom_reward_function.path is not None:
        return []
    tasks = {task.name: task for task in map(TASK_OF.get, sources) if task is not None}
    return [f"task {name}: {lack}" for name in tasks for lack in tasks[name].missing()]
