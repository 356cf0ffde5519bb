"""Checks the configuration, and records the start, before verl's `run_ppo` starts Ray.

It imports all of our functions, so that gdpo is refused before a model is loaded. It refuses to go
on from a checkpoint that is not whole, and from one that was made with other settings.

Relies on verl 0.9 `run_ppo(config, task_runner_class)` in `verl/trainer/main_ppo.py`, whose `main`
first calls `verl.utils.device.auto_set_device(config)`. `python -m verl.trainer.main_ppo` runs that
file as `__main__`, which no import hook sees, so its `run_ppo` is extended in that call.
The main modules of `one_step_off_policy` and `fully_async_policy` import that file as a module.
"""

import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import verl
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from verl_gdpo.hooks.before_training import probing, sources_in, training_sources
from verl_gdpo.hooks.configuration import has_gdpo, settings_of_run, uses_gdpo_manager
from verl_gdpo.hooks.extend import Function, extend_module, load_all, table
from verl_gdpo.hooks.gates import names_gdpo, refuse_gdpo, warn
from verl_gdpo.hooks.rollout_guard import naming_the_trainer
from verl_gdpo.hooks.unread_keys import refuse_unread_keys
from verl_gdpo.scoring.function_list import check_sources
from verl_gdpo.scoring.limits import check_limits
from verl_gdpo.tools.run import attention, end_conditions, resume, resumed, starts
from verl_gdpo.tools.run.starts import RecordedStart, StartManifest
from verl_gdpo.tools.run_folder.folder import of_recipes, write_into_run_dir

MAIN = "verl.trainer.main_ppo"
LOGGERS = ("TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH")  # what they read


def check_and_run(run_ppo: Function, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the configuration, and record the start.

    Once Ray runs, and before the trainer's process starts, the nodes are compared.
    """
    if of_recipes(config):  # Ray's processes on a cluster that runs have another folder
        config.run_dir = str(Path(config.run_dir).resolve())
    if has_gdpo(config):  # first: what follows cannot see a setting whose key is misspelt
        for warning in refuse_unread_keys(config, _runner_of(args, kwargs)):
            warn(warning)
    sources = training_sources(config) if has_gdpo(config) else None
    is_ours = settings_of_run(config, sources) is not None
    if is_ours:
        if uses_gdpo_manager(config):
            check_limits(config)
            validated = sources_in(config, "val_files")
            if sources is not None and validated is not None:
                check_sources(config, sources | validated)  # the trainer logs its warnings
        if end_conditions.KEY in config.trainer:
            end_conditions.floor_seconds(config.trainer[end_conditions.KEY])
    composed = deepcopy(config)
    if message := attention.choose(config):  # before the start is recorded
        print(f"verl-gdpo: {message}", flush=True)
    if is_ours:
        args, kwargs = _with_runner(probing(_runner_of(args, kwargs)), args, kwargs)
    is_recorded = is_ours or of_recipes(config)
    with recorded_start(config, is_ours=is_recorded, composed=composed):
        if is_recorded:
            write_into_run_dir(config)
            hand_over(config, *LOGGERS)
        with naming_the_trainer() if is_ours else nullcontext():
            return run_ppo(config, *args, **kwargs)


def _runner_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the class of the trainer's process, out of what follows the configuration."""
    return args[0] if args else kwargs.get("task_runner_class")


def _with_runner(
    runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what follows the configuration, with another class in the same place."""
    if args:
        return (runner, *args[1:]), kwargs
    return args, {**kwargs, "task_runner_class": runner}


def check_and_set_device(auto_set_device: Function, config: Any) -> Any:
    """Refuse a gdpo that cannot run, and extend `run_ppo` of the main module."""
    if names_gdpo(config):
        load_all()
    refuse_gdpo(config)
    main = sys.modules["__main__"]
    of_verl = Path(verl.__path__[0], "trainer", "main_ppo.py").resolve()
    if Path(getattr(main, "__file__", None) or "").resolve() == of_verl:
        extend_module(main, [each for each in table if each.module == MAIN])
    return auto_set_device(config)


@contextmanager
def recorded_start(config: Any, *, is_ours: bool, composed: Any = None) -> Iterator[None]:
    """Check and record a start; record the end of the block, if Python gets to it.

    Args:
        config: verl's configuration. `allow_change` is taken out of it, and with W&B the run's id
            is put into the environment of Ray's processes.
        is_ours: whether a run without a manifest gets one.
        composed: `config` as Hydra composed it, where something was chosen since for this machine
            alone. A resume goes on with it, so that it chooses again.

    Raises:
        ValueError: a checkpoint would be loaded that is not whole, or that was made with other
            settings.
    """
    checkpoint = resumed.checkpoint_to_load(config)
    earlier = None if checkpoint is None else starts.maker_of(checkpoint)
    if not (is_ours or earlier):
        yield
        return
    resumed.check_before_load(config)
    allowed = _taken_out(config, resume.ALLOW)
    composed = config if composed is None else composed
    _taken_out(composed, resume.ALLOW)
    start = _start(config, checkpoint, earlier, allowed)
    changed = [f"changed in this resume: {resume.listed(start.changes)}"]
    for warning in [*start.warnings, *(changed if start.changes else [])]:
        warn(warning)
    run = run_folder(config)
    try:
        starts.write(run, start, OmegaConf.to_yaml(composed))
        starts.link(run, Path(config.trainer.default_local_dir).resolve())
    except OSError as error:
        warn(f"the start is not recorded, so that no resume is compared with it: {error}")
        yield
        return
    if resumed.note_saved_before(config, checkpoint):
        hand_over(config, resumed.SAVED_BEFORE)
    if start.wandb_run_id:  # W&B goes on with it, in whichever process verl calls it
        os.environ["WANDB_RUN_ID"] = start.wandb_run_id
        os.environ.setdefault("WANDB_RESUME", "allow")
        hand_over(config, "WANDB_RUN_ID", "WANDB_RESUME")
    why = "finished"
    try:
        yield
    except BaseException as error:
        *_, last = ["", *str(error).strip().splitlines()]
        why = f"{type(error).__name__}: {last}"
        raise
    finally:
        # a full disk, a damaged or deleted folder: how the run ended is worth more
        with suppress(OSError, ValueError):
            starts.ended(run, why)


def run_folder(config: Any) -> Path:
    """`run_dir` of our recipes, or the folder of checkpoints."""
    folder = config.run_dir if of_recipes(config) else config.trainer.default_local_dir
    return Path(folder).resolve()


def _start(
    config: Any, checkpoint: Path | None, earlier: RecordedStart | None, allowed: Sequence[str]
) -> StartManifest:
    """The start to record.

    Raises:
        ValueError: it would go on with other settings than the checkpoint was made with.
    """
    written: Any = OmegaConf.to_container(config, resolve=False)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    start = starts.here(
        written,
        files=resume.file_states(resolved),
        recipes=dict(earlier.start.recipes) if earlier else _recipes(),
        wandb_run_id=_wandb_run_id(config, earlier),
        checkpoint=str(checkpoint or ""),
    )
    if checkpoint is None:
        return start
    if earlier is None:
        unknown = "nothing tells whether the settings are those of its run"
        return replace(start, warnings=[f"no start is recorded that made {checkpoint}: {unknown}"])
    changed = resume.changes(earlier.start, start)
    if reasons := resume.refusal(changed, allowed):
        raise ValueError(
            f"verl-gdpo: no resume from {checkpoint}, which was made with other settings, recorded "
            f"in {earlier.folder}: {reasons}"
        )
    warnings = starts.code_change(earlier, start) + resume.remarks(changed)
    return replace(start, changes=changed, warnings=warnings)


def _recipes() -> dict[str, str]:
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    return {str(k): str(v) for k, v in choices.items() if not {*"/@"} & {*str(k)}}


def _wandb_run_id(config: Any, earlier: RecordedStart | None) -> str:
    """The id in W&B: that of the run that goes on, or a new one; "" without W&B."""
    if "wandb" not in (config.trainer.get("logger") or []):
        return ""
    known = earlier.start.wandb_run_id if earlier else ""
    return os.environ.get("WANDB_RUN_ID") or known or uuid.uuid4().hex[:8]


def hand_over(config: Any, *names: str) -> None:
    """Give variables of this process to those that Ray starts, on whichever cluster it does."""
    for name in {*names} & os.environ.keys():
        key = f"ray_kwargs.ray_init.runtime_env.env_vars.{name}"
        OmegaConf.update(config, key, os.environ[name], force_add=True)


def _taken_out(config: Any, key: str) -> list[str]:
    with open_dict(config):
        value = config.pop(key, None) or []
    return [value] if isinstance(value, str) else [str(one) for one in value]
