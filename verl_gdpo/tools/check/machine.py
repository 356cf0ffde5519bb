"""Checks what a run needs on this machine: the device, a folder for Ray, and a local model."""

import os
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf

from verl_gdpo.rewards import TASK_OF, options_for
from verl_gdpo.rewards.sandbox_service import Service
from verl_gdpo.tools.check.gpu_memory import (
    memory_problems,
    needed_disk_gb,
    needed_gb,
    shape_of,
)
from verl_gdpo.tools.check.gpus import LEAST_DISK_GB, find_gpus, missing

# {name in trainer.logger: the package that verl 0.9's `Tracking` imports}
TRACKERS = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "clearml": "clearml",
    "trackio": "trackio",
    "rl_insight": "rl_insight",
    "vemlp_wandb": "volcengine_ml_platform",
}


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
            f"trainer.n_gpus_per_node={wanted}, but {found} GPUs are here{build}. If the run will "
            "be on another machine: --elsewhere. Our recipes run without a GPU: hardware=cpu and "
            "VERL_PLATFORM=cpu"
        )
    there = _first_that_exists(Path(str(config.trainer.default_local_dir)))
    is_fsdp = str(config.actor_rollout_ref.actor.strategy).startswith("fsdp")
    shape = shape_of(str(config.actor_rollout_ref.model.path)) if is_fsdp else None
    disk_gb = needed_disk_gb(shape) if shape else LEAST_DISK_GB
    problems = missing(find_gpus(os.environ), there, disk_gb)
    gpu_gb = min(torch.cuda.get_device_properties(i).total_memory for i in range(wanted)) / 1e9
    remark = f"{found} GPUs of {gpu_gb:.0f} GB"
    if shape is None:
        reason = "no language model is here yet" if is_fsdp else "the strategy is not FSDP"
        remark += f"; {reason}, so what it needs of them is not known"
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
            "default): flash-attn is not installed here. Set it to sdpa (with a +; our recipes: "
            "attention=sdpa), or install it: `./setup_env.sh gpu flash-attn`"
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


def missing_models(config: Any, trains_critic: bool) -> list[str]:
    """A sentence for each model that is a folder without a model; verl looks up names on a hub."""
    models = {"actor_rollout_ref.model.path": config.actor_rollout_ref.model.path}
    if trains_critic:
        models["critic.model.path"] = config.critic.model.path
    if config.reward.reward_model.enable:
        models["reward.reward_model.model_path"] = config.reward.reward_model.model_path
    return [
        f"{key}={path}: no model is there (no config.json). Name the folder of a model, or one of "
        "a hub such as Qwen/Qwen2.5-1.5B-Instruct; recipes/README.md says how the tiny policies "
        "of runs without a GPU are made"
        for key, path in models.items()
        if _is_folder(config, str(path))
        and not (Path(str(path)).expanduser() / "config.json").is_file()
    ]


def _is_folder(config: Any, path: str) -> bool:
    beginnings = (config.get("data_dir") or "/", "/", ".", "~")
    return path.startswith(tuple(str(text) for text in beginnings))


def missing_trackers(config: Any) -> list[str]:
    """A sentence for each tracker of `trainer.logger` that would stop the run at its first step."""
    given = config.trainer.logger
    names = [given] if isinstance(given, str) else list(given or [])
    problems = [
        f"trainer.logger={name}: the package {package} is not installed here. Install it, or set "
        "trainer.logger=[console,file]"
        for name, package in TRACKERS.items()
        if name in names and find_spec(package) is None
    ]
    if "wandb" in names and not _has_wandb_key(config):
        problems.append(
            "trainer.logger=wandb: no API key is here, and the run would end once the model is "
            "loaded. Run `wandb login`, or set WANDB_API_KEY, WANDB_MODE=offline or "
            "trainer.logger=[console,file]"
        )
    return problems


def _has_wandb_key(config: Any) -> bool:
    variables = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    environment = {**os.environ, **variables}
    if environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    if environment.get("WANDB_API_KEY") or environment.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    file = Path(environment.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc(file).authenticators(host) is not None
    except OSError:
        return False
    except NetrcParseError:  # let W&B judge
        return True


def missing_files(config: Any) -> list[str]:
    """A sentence for each file that a worker would look for in vain."""
    rollout = config.actor_rollout_ref.rollout
    files = {
        "multi_turn.tool_config_path": rollout.multi_turn.tool_config_path,
        "multi_turn.function_tool_path": rollout.multi_turn.get("function_tool_path"),
        "agent.agent_loop_config_path": rollout.agent.get("agent_loop_config_path"),
    }
    return [
        f"actor_rollout_ref.rollout.{key}={path}: there is no such file"
        for key, path in files.items()
        if path and "://" not in path and not Path(path).expanduser().is_file()
    ]


def unusable_folders(config: Any) -> list[str]:
    """A sentence for each folder in which the run could not write."""
    keys = ["rollout_data_dir", "validation_data_dir"]
    keys += ["default_local_dir"] if config.trainer.save_freq > 0 else []
    problems = []
    for key in keys:
        path = config.trainer.get(key)
        if not path or "://" in path:
            continue
        there = _first_that_exists(Path(path))
        if not there.is_dir() or not os.access(there, os.W_OK):
            what = "is no folder" if not there.is_dir() else "cannot be written"
            problems.append(f"trainer.{key}={path}: {there} {what}")
    return problems


def _first_that_exists(path: Path) -> Path:
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())


def what_scorers_miss(config: Any, sources: Iterable[str]) -> list[str]:
    """What our scorers of these data sources cannot have here.

    Raises:
        OSError: one cannot score, here or in the service of `reward.sandbox_fusion`.
        ValueError: that block cannot be meant.
    """
    if config.reward.custom_reward_function.path is not None:
        return []
    service = Service.of(config.reward.get("sandbox_fusion"))
    options = dict(config.reward.get("reward_kwargs") or {})
    tasks = {TASK_OF[source].name: source for source in sources if source in TASK_OF}
    return [
        f"task {name}: {lack}"
        for name, source in tasks.items()
        for lack in (
            service if service and TASK_OF[source].takes_service else TASK_OF[source]
        ).missing(**options_for(source, options))
    ]
