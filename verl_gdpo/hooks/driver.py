"""Checks the configuration, and records the start, before verl's `run_ppo` starts Ray.

It imports all of our functions, so that gdpo is refused before a model is loaded. It is the only
process of verl that imports `run`.

Relies on verl 0.9 `run_ppo(config, task_runner_class)` in `verl/trainer/main_ppo.py`, whose `main`
first calls `verl.utils.device.auto_set_device(config)`. `python -m verl.trainer.main_ppo` runs that
file as `__main__`, which no import hook sees, so its `run_ppo` is extended in that call.
The main modules of `one_step_off_policy` and `fully_async_policy` import that file as a module.
"""

import os
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import verl
from omegaconf import OmegaConf

from verl_gdpo.hooks import attention
from verl_gdpo.hooks.configuration import has_gdpo, refuse_limits, settings_of_run
from verl_gdpo.hooks.extend import Function, extend_module, load_all, table
from verl_gdpo.hooks.gates import refuse_gdpo
from verl_gdpo.hooks.nodes import probing
from verl_gdpo.hooks.refusal import names_gdpo
from verl_gdpo.hooks.resume import hand_over, recorded_start
from verl_gdpo.hooks.reward_workers import training_sources
from verl_gdpo.hooks.rollout_guard import naming_the_trainer
from verl_gdpo.run import hang_watch
from verl_gdpo.run.folder import of_recipes, write_into_run_dir

MAIN = "verl.trainer.main_ppo"
LAUNCHER = "VERL_GDPO_LAUNCHER"  # "1" in the environment of what our launcher starts
LOGGERS = ("TENSORBOARD_DIR", "WANDB_DIR", "VERL_FILE_LOGGER_PATH")  # what they read


def check_hang_minutes(config: Any) -> None:
    """Check `trainer.hang_minutes`, and say where nobody watches the run.

    Raises:
        ValueError: the key holds something else than a number of minutes.
    """
    minutes = OmegaConf.select(config, hang_watch.KEY)
    if minutes is None:
        return
    hang_watch.floor_seconds(minutes)
    if os.environ.get(LAUNCHER) != "1":
        print(
            f"verl-gdpo: {hang_watch.KEY} has no effect here: the launcher (run.sh, "
            "verl_gdpo.run.launch) watches a run",
            flush=True,
        )


def check_and_run(
    run_ppo: Function, config: Any, task_runner_class: Any = None, **kwargs: Any
) -> Any:
    """Check the configuration, and record the start.

    Once Ray runs, and before the trainer's process starts, the nodes are compared.
    """
    if of_recipes(config):  # Ray's processes on a cluster that runs have another folder
        config.run_dir = str(Path(config.run_dir).resolve())
    sources = training_sources(config) if has_gdpo(config) else None
    is_ours = settings_of_run(config, sources) is not None
    if is_ours:
        refuse_limits(config)
        check_hang_minutes(config)
    composed = deepcopy(config)
    if message := attention.choose(config):  # before the start is recorded
        print(f"verl-gdpo: {message}", flush=True)
    if is_ours:
        task_runner_class = probing(task_runner_class)
    is_recorded = is_ours or of_recipes(config)
    with recorded_start(config, is_ours=is_recorded, composed=composed):
        if is_recorded:
            write_into_run_dir(config)
            hand_over(config, *LOGGERS)
        with naming_the_trainer() if is_ours else nullcontext():
            return run_ppo(config, task_runner_class=task_runner_class, **kwargs)


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
