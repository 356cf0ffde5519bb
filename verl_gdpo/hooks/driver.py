"""Checks the configuration before verl's `run_ppo` starts Ray, and the nodes once Ray runs.

It imports all of our functions, so that gdpo is refused before a model is loaded.

Relies on verl 0.9 `run_ppo(config, task_runner_class)` in `verl/trainer/main_ppo.py`, whose `main`
first calls `verl.utils.device.auto_set_device(config)`. `python -m verl.trainer.main_ppo` runs that
file as `__main__`, which no import hook sees, so its `run_ppo` is extended in that call.
The main modules of `one_step_off_policy` and `fully_async_policy` import that file as a module.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import verl

from verl_gdpo.hooks import run_keys
from verl_gdpo.hooks.before_training import probing, sources_in, training_sources
from verl_gdpo.hooks.configuration import has_gdpo, settings_of_run, uses_gdpo_manager
from verl_gdpo.hooks.extend import Function, extend_module, load_all, table
from verl_gdpo.hooks.lookup import refuse_gdpo
from verl_gdpo.hooks.refusal import names_gdpo, warn
from verl_gdpo.hooks.rollout_guard import naming_the_trainer
from verl_gdpo.hooks.unread_keys import refuse_unread_keys
from verl_gdpo.scoring.function_list import check_sources
from verl_gdpo.scoring.limits import check_limits
from verl_gdpo.scoring.response import thought_tags

MAIN = "verl.trainer.main_ppo"


def check_and_set_device(auto_set_device: Function, config: Any) -> Any:
    """Refuse a gdpo that cannot run, and extend `run_ppo` of the main module."""
    if names_gdpo(config):
        load_all()
    refuse_gdpo(config)
    main = sys.modules["__main__"]
    file_of_verl = Path(verl.__path__[0], "trainer", "main_ppo.py").resolve()
    file_of_main = Path(getattr(main, "__file__", None) or "").resolve()
    if file_of_main == file_of_verl:
        extend_module(main, [each for each in table if each.module == MAIN])
    return auto_set_device(config)


def check_and_run(run_ppo: Function, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the configuration, and name the trainer's process if it dies.

    Once Ray runs, and before the trainer's process starts, the nodes are compared.
    """
    if not has_gdpo(config):
        settings_of_run(config)  # which refuses GDPO in capital letters
        return run_ppo(config, *args, **kwargs)
    runner = _runner_of(args, kwargs)
    check_run(config, runner)
    args, kwargs = _with_runner(probing(runner), args, kwargs)
    with naming_the_trainer():
        return run_ppo(config, *args, **kwargs)


def check_run(config: Any, runner: Any) -> None:
    """Check the configuration of a run with gdpo.

    Args:
        runner: the class of the trainer's process, or None for that of verl.

    Raises:
        ValueError: something cannot work with gdpo, or would be without effect.
    """
    # First: what follows cannot see a setting whose key is misspelt.
    for warning in refuse_unread_keys(config, runner):
        warn(warning)
    trained = training_sources(config)
    settings_of_run(config, trained)
    if uses_gdpo_manager(config):
        check_limits(config)
        thought_tags(config)
        validated = sources_in(config, "val_files")
        if trained is not None and validated is not None:
            check_sources(config, trained, validated)  # the trainer logs its warnings
    if run_keys.HANG_MINUTES in config.trainer:
        run_keys.hang_seconds(config.trainer[run_keys.HANG_MINUTES])


def _runner_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the class of the trainer's process, out of what follows the configuration."""
    if args:
        return args[0]
    return kwargs.get("task_runner_class")


def _with_runner(
    runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what follows the configuration, with another class in the same place."""
    if args:
        return (runner, *args[1:]), kwargs
    return args, {**kwargs, "task_runner_class": runner}
