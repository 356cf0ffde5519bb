"""Records the start of a run before Ray starts, and compares a resume with the start before it.

It refuses to go on from a checkpoint that is not whole, and from one that was made with other
settings. Runs with gdpo are recorded, whoever starts them, and runs of our recipes.

Relies on verl 0.9 `run_ppo(config, task_runner_class)` in `verl/trainer/main_ppo.py`.
"""

import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.configuration import has_gdpo
from verl_gdpo.hooks.refusal import warn
from verl_gdpo.hooks.rollout_guard import naming_the_trainer, ray_is_running
from verl_gdpo.hooks.run_keys import ALLOW_CHANGE
from verl_gdpo.tools.run import attention, checkpoint_loading, precision, resume, starts
from verl_gdpo.tools.run.starts import RecordedStart, StartManifest
from verl_gdpo.tools.run_folder.folder import (
    LOGGER_FILE,
    has_earlier_metrics,
    keep_earlier_metrics,
    of_recipes,
    write_into_run_dir,
)

# The variables that verl's loggers read.
LOGGERS = ("TENSORBOARD_DIR", "WANDB_DIR", LOGGER_FILE)


def record_and_run(call: Call) -> Any:
    """Record the start and the end of a run, and let its loggers write into its folder.

    What cannot work with gdpo was refused before: see `hooks/driver.py`.
    """
    config = call["config"]
    is_of_recipes = of_recipes(config)
    if is_of_recipes:
        # Ray's processes on a cluster that runs have another folder.
        config.run_dir = str(Path(config.run_dir).resolve())
    composed = deepcopy(config)
    for choose in (attention.choose, precision.choose):
        message = choose(config)
        if message is not None:
            print(f"verl-gdpo: {message}", flush=True)
    if "file" in (config.trainer.get("logger") or []):
        _keep_metrics()
    is_gdpo = has_gdpo(config)
    is_recorded = is_gdpo or is_of_recipes
    with recorded_start(config, is_recorded=is_recorded, composed=composed):
        if is_recorded:
            write_into_run_dir(config)
            hand_over(config, *LOGGERS)
        # Here too, so that the recorded end says which process died.
        with naming_the_trainer() if is_gdpo else nullcontext():
            return call.hand_on()


def _keep_metrics() -> None:
    """Let the metrics of an earlier training of the same command stay, also those of plain verl."""
    if has_earlier_metrics() and ray_is_running():
        # Ray's processes have the variables of the time at which Ray started.
        warn(
            f"{LOGGER_FILE}={os.environ[LOGGER_FILE]} has the metrics of an earlier training of "
            "this command, and verl's file logger empties it, because Ray runs since then. Call "
            "ray.shutdown() between two trainings, or start each in a process of its own, to keep "
            "both"
        )
        return
    keep_earlier_metrics()


@contextmanager
def recorded_start(config: Any, *, is_recorded: bool, composed: Any = None) -> Iterator[None]:
    """Check and record a start; record the end of the block, if Python gets to it.

    Args:
        config: verl's configuration. `allow_change` is taken out of it, and with W&B the run's id
            is put into the environment of Ray's processes.
        is_recorded: whether a run without a manifest gets one.
        composed: `config` as Hydra composed it, where something was chosen since for this machine
            alone. A resume goes on with it, so that it chooses again.

    Raises:
        ValueError: a checkpoint would be loaded that is not whole, or that was made with other
            settings.
    """
    checkpoint = checkpoint_loading.checkpoint_to_load(config)
    earlier = None
    if checkpoint is not None:
        earlier = starts.maker_of(checkpoint)
    if not is_recorded and earlier is None:
        yield
        return
    checkpoint_loading.check_before_load(config)
    allowed = _taken_out(config, ALLOW_CHANGE)
    if composed is None:
        composed = config
    _taken_out(composed, ALLOW_CHANGE)
    start = _start(config, checkpoint, earlier, allowed)
    for warning in start.warnings:
        warn(warning)
    if start.changes:
        warn(f"changed in this resume: {resume.listed(start.changes)}")
    run = run_folder(config)
    try:
        starts.write(run, start, OmegaConf.to_yaml(composed))
        starts.link(run, Path(config.trainer.default_local_dir).resolve())
    except OSError as error:
        warn(f"the start is not recorded, so that no resume is compared with it: {error}")
        yield
        return
    if checkpoint_loading.note_saved_before(config, checkpoint):
        hand_over(config, checkpoint_loading.SAVED_BEFORE)
    if start.wandb_run_id:  # W&B goes on with it, in whichever process verl calls it
        os.environ["WANDB_RUN_ID"] = start.wandb_run_id
        os.environ.setdefault("WANDB_RESUME", "allow")
        hand_over(config, "WANDB_RUN_ID", "WANDB_RESUME")
    why = "finished"
    try:
        yield
    except BaseException as error:
        why = _last_line(error)
        raise
    finally:
        # A full disk, a damaged or deleted folder: how the run ended is worth more.
        with suppress(OSError, ValueError):
            starts.ended(run, why)


def _last_line(error: BaseException) -> str:
    """Return the type of an error, and the last line of its text."""
    lines = str(error).strip().splitlines()
    last = lines[-1] if lines else ""
    return f"{type(error).__name__}: {last}"


def run_folder(config: Any) -> Path:
    """Return `run_dir` of our recipes, or the folder of checkpoints."""
    if of_recipes(config):
        return Path(config.run_dir).resolve()
    return Path(config.trainer.default_local_dir).resolve()


def _start(
    config: Any, checkpoint: Path | None, earlier: RecordedStart | None, allowed: Sequence[str]
) -> StartManifest:
    """Return the start to record.

    Args:
        checkpoint: what verl will load; None for a run from the first step.
        earlier: the start that made the checkpoint; None if nobody knows it.
        allowed: the keys whose change is wanted.

    Raises:
        ValueError: it would go on with other settings than the checkpoint was made with.
    """
    written: Any = OmegaConf.to_container(config, resolve=False)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    start = starts.here(
        written,
        files=resume.file_states(resolved),
        recipes=_recipes(earlier),
        wandb_run_id=_wandb_run_id(config, earlier),
        checkpoint=str(checkpoint or ""),
    )
    if checkpoint is None:
        return start
    if earlier is None:
        unknown = "nothing tells whether the settings are those of its run"
        return replace(start, warnings=[f"no start is recorded that made {checkpoint}: {unknown}"])
    changed = resume.changes(earlier.start, start)
    reasons = resume.refusal(changed, allowed)
    if reasons:
        raise ValueError(
            f"verl-gdpo: no resume from {checkpoint}, which was made with other settings, recorded "
            f"in {earlier.folder}: {reasons}"
        )
    warnings = starts.code_change(earlier, start) + resume.remarks(changed)
    return replace(start, changes=changed, warnings=warnings)


def _recipes(earlier: RecordedStart | None) -> dict[str, str]:
    """Return {group: choice} of the recipes: of the run that goes on, or as Hydra composed them."""
    if earlier is not None:
        return dict(earlier.start.recipes)
    if not HydraConfig.initialized():
        return {}
    recipes = {}
    for group, choice in HydraConfig.get().runtime.choices.items():
        is_ours = "/" not in str(group) and "@" not in str(group)  # others are of verl or Hydra
        if is_ours:
            recipes[str(group)] = str(choice)
    return recipes


def _wandb_run_id(config: Any, earlier: RecordedStart | None) -> str:
    """Return the id in W&B: that of the run that goes on, or a new one; "" without W&B."""
    if "wandb" not in (config.trainer.get("logger") or []):
        return ""
    given = os.environ.get("WANDB_RUN_ID")
    if given:
        return given
    if earlier is not None and earlier.start.wandb_run_id:
        return earlier.start.wandb_run_id
    return uuid.uuid4().hex[:8]


def hand_over(config: Any, *names: str) -> None:
    """Give variables of this process to those that Ray starts, on whichever cluster it does."""
    for name in names:
        if name in os.environ:
            key = f"ray_kwargs.ray_init.runtime_env.env_vars.{name}"
            OmegaConf.update(config, key, os.environ[name], force_add=True)


def _taken_out(config: Any, key: str) -> list[str]:
    """Take a key with one text or several out of a configuration, and return them."""
    with open_dict(config):
        value = config.pop(key, None) or []
    if isinstance(value, str):
        return [value]
    return [str(each) for each in value]
