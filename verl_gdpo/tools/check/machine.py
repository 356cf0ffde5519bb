"""What a run needs on this machine: verl and us, a device, disks, packages, models, W&B's key."""

import os
import shutil
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from omegaconf import OmegaConf
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import verl_gdpo
from verl_gdpo.hooks.verl_questions import VERSION, import_parts, trains_critic
from verl_gdpo.tasks import TASK_BY_SOURCE, options_for
from verl_gdpo.tools.check.on_gpus import first_that_exists, model_config
from verl_gdpo.tools.check.ray_start import ray_folder

LEAST_FREE_GB = 1.0  # logs, dumps, and checkpoints of a small policy
# {name in trainer.logger: the package that verl 0.9's `Tracking` imports for it}
TRACKERS = {
    **{name: name for name in ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")},
    **{"rl_insight": "rl_insight", "vemlp_wandb": "volcengine_ml_platform"},
}


def check_environment(config: Any) -> str:
    """Return the versions; raise ValueError if verl does not load us, or lacks a dependency."""
    plugin = sys.modules.get("verl_gdpo.plugin")
    if plugin is None:
        chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
        raise ValueError(
            f"verl {VERSION} did not load verl-gdpo: VERL_USE_EXTERNAL_PLUGINS={chosen}, "
            f"VERL_USE_EXTERNAL_MODULES={os.environ.get('VERL_USE_EXTERNAL_MODULES')}. Set the "
            "latter to verl_gdpo.plugin, or name verl_gdpo in the former"
        )
    try:
        import_parts(config)
    except ImportError as error:
        raise ValueError(
            f"{error.name} cannot be imported: {error}. verl's default trainer needs "
            "TransferQueue, fastapi, uvicorn and cachetools, which verl does not install; "
            "verl-gdpo does"
        ) from error
    if plugin.refusals:
        raise ValueError("verl-gdpo refuses to run: " + "; ".join(plugin.refusals))
    check_device(config.trainer.device)
    return f"verl {VERSION}, verl-gdpo {verl_gdpo.__version__}"


def what_may_replace_verl() -> list[str]:
    """A sentence if verl is a development version, or newer than the supported ones."""
    if VERSION in SpecifierSet(verl_gdpo.SUPPORTED_VERL) and not Version(VERSION).is_prerelease:
        return []
    return [
        f"verl {VERSION} is a development version, or newer than the supported ones; "
        "docs/trainers.md says what was tested. `pip install 'verl-gdpo[gpu]'` and `[cpu]` would "
        "replace it by a release: install with --no-deps, or without these extras"
    ]


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


def what_is_missing(config: Any) -> list[str]:
    """A sentence for each thing but Ray and a GPU that this machine lacks."""
    questions = full_disks, missing_packages, missing_trackers, missing_files, unusable_folders
    return [problem for ask in questions for problem in ask(config)]


def missing_packages(config: Any) -> list[str]:
    """What the engines of a run cannot import here, a sentence each.

    Relies on verl 0.9's `HFModelConfig`, which takes flash_attention_2 where nothing is said, and
    on transformers 5, which takes the package `kernels` in the place of flash-attn.
    """
    problems = []
    engine = str(config.actor_rollout_ref.rollout.name)
    if engine in ("vllm", "sglang") and find_spec(engine) is None:
        problems.append(
            f"actor_rollout_ref.rollout.name={engine}: {engine} is not installed here. "
            "`./setup_env.sh gpu` and `pip install 'verl-gdpo[gpu]'` bring vllm; without a GPU, "
            "`./setup_env.sh cpu vllm` does"
        )
    if config.trainer.device != "cuda":
        return problems
    model = config.actor_rollout_ref.model
    attention = model.override_config.get("attn_implementation", "flash_attention_2")
    if attention == "flash_attention_2" and not (find_spec("flash_attn") or find_spec("kernels")):
        problems.append(
            "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 (verl's "
            "default): flash-attn is not installed here. Set it to auto (with a +; our recipes: "
            "attention=auto), or install it: `./setup_env.sh gpu flash-attn`"
        )
    return problems


def full_disks(config: Any) -> list[str]:
    """A sentence for each full disk; `check_gpus` looks at the checkpoints of a run on GPUs."""
    folders = [ray_folder(config)]
    if config.trainer.device != "cuda":
        folders.append(Path(str(config.trainer.default_local_dir)))
    free_gb = {
        there: shutil.disk_usage(there).free / 1e9 for there in map(first_that_exists, folders)
    }
    return [
        f"{there}: {free:.2f} GB free; expected at least {LEAST_FREE_GB:g}. Make room, or name "
        "other folders in trainer.default_local_dir and TMPDIR"
        for there, free in free_gb.items()
        if free < LEAST_FREE_GB
    ]


def missing_models(config: Any) -> list[str]:
    """A sentence for each model that is a folder without a model; verl looks up names on a hub."""
    keys = ["actor_rollout_ref.model.path"]
    keys += ["critic.model.path"] if trains_critic(config) else []
    keys += ["reward.reward_model.model_path"] if config.reward.reward_model.enable else []
    of_a_folder = (str(config.get("data_dir") or "/"), "/", ".", "~")
    return [
        f"{key}={path}: no model is there (no config.json). Name the folder of a model, or one of "
        "a hub such as Qwen/Qwen2.5-1.5B-Instruct; recipes/README.md says how the tiny policies "
        "of runs without a GPU are made"
        for key, path in ((key, str(OmegaConf.select(config, key))) for key in keys)
        if path.startswith(of_a_folder) and not (Path(path).expanduser() / "config.json").is_file()
    ]


def too_few_positions(config: Any) -> list[str]:
    """A sentence if the rollout's `max_model_len` is more than the model has positions.

    Relies on verl 0.9's `get_max_position_embeddings`, with which each rollout engine refuses it.
    """
    model = config.actor_rollout_ref.model
    length = config.actor_rollout_ref.rollout.max_model_len
    of_model = model_config(str(model.get("hf_config_path") or model.path)) if length else None
    if of_model is None:
        return []
    key = "max_position_embeddings"
    positions = model.override_config.get(key) or getattr(of_model.get_text_config(), key, length)
    if length <= positions:
        return []
    return [
        f"actor_rollout_ref.rollout.max_model_len={length}: actor_rollout_ref.model.path="
        f"{model.path} has {positions} positions. Set it to {positions} or less"
    ]


def missing_trackers(config: Any) -> list[str]:
    """A sentence for each tracker of `trainer.logger` that would stop the run at its first step."""
    loggers = config.trainer.logger
    names = [loggers] if isinstance(loggers, str) else list(loggers or [])
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
    is_offline = environment.get("WANDB_MODE") in ("offline", "disabled", "dryrun")
    if is_offline or any(map(environment.get, ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))):
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
    names = "multi_turn.tool_config", "multi_turn.function_tool", "agent.agent_loop_config"
    keys = [f"actor_rollout_ref.rollout.{name}_path" for name in names]
    return [
        f"{key}={path}: there is no such file"
        for key, path in ((key, OmegaConf.select(config, key)) for key in keys)
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
        there = first_that_exists(Path(path))
        if not there.is_dir() or not os.access(there, os.W_OK):
            what = "is no folder" if not there.is_dir() else "cannot be written"
            problems.append(f"trainer.{key}={path}: {there} {what}")
    return problems


def what_scorers_miss(config: Any, sources: Iterable[str]) -> list[str]:
    """What our scorers of these data sources cannot have here.

    Raises:
        OSError: one cannot score here.
    """
    if config.reward.custom_reward_function.path is not None:
        return []
    options = dict(config.reward.get("reward_kwargs") or {})
    tasks = {TASK_BY_SOURCE[source].name: source for source in sources if source in TASK_BY_SOURCE}
    lacks = []
    for name, source in tasks.items():
        task = TASK_BY_SOURCE[source]
        missing = task.missing(**options_for(source, options))
        lacks += [f"task {name}: {lack}" for lack in missing]
    return lacks
