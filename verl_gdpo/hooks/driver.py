"""Checks the configuration before verl's `run_ppo` starts Ray, and the nodes once Ray runs.

It imports all of our functions, so that gdpo is refused before a model is loaded.

Relies on verl 0.9 `run_ppo(config, task_runner_class)` in `verl/trainer/main_ppo.py`, whose `main`
first calls `verl.utils.device.auto_set_device(config)`. `python -m verl.trainer.main_ppo` runs that
file as `__main__`, which no import hook sees, so its `run_ppo` is extended in that call.
The main modules of `one_step_off_policy` and `fully_async_policy` import that file as a module.
"""

from typing import Any

from verl_gdpo.algorithm.settings import SettingsError
from verl_gdpo.hooks import net
from verl_gdpo.hooks.before_training import probing, sources_in, training_sources
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.configuration import (
    has_gdpo,
    mistakes_beside_the_settings,
    noted,
    settings_and_mistakes_of_run,
    settings_of_run,
    unread_settings,
    uses_gdpo_manager,
)
from verl_gdpo.hooks.extend import extend_module, load_all, table
from verl_gdpo.hooks.lookup import refuse_gdpo
from verl_gdpo.hooks.refusal import names_gdpo, warn
from verl_gdpo.hooks.rollout_guard import naming_the_trainer
from verl_gdpo.hooks.unread_keys import find_unread_keys
from verl_gdpo.scoring.function_list import check_sources

MAIN = "verl.trainer.main_ppo"


def check_and_set_device(call: Call) -> Any:
    """Refuse a gdpo that cannot run, and extend `run_ppo` of the main module."""
    config = call["config"]
    # Another run neither waits for the imports of all that we have, nor is refused by one.
    if names_gdpo(config):
        load_all()
    refuse_gdpo(config)
    main = net.verls_main()
    # A script of the user's imports the module of `run_ppo`, which the import hook has seen.
    if main is not None:
        extend_module(main, [each for each in table if each.module == MAIN])
        if names_gdpo(config):
            net.warn_of_idle_start()
    return call.hand_on()


def check_and_run(call: Call) -> Any:
    """Check the configuration, and name the trainer's process if it dies.

    Once Ray runs, and before the trainer's process starts, the nodes are compared.
    """
    config = call["config"]
    if not has_gdpo(config):
        settings_of_run(config)  # which refuses GDPO in capital letters
        for warning in unread_settings(config):
            warn(warning)
        return call.hand_on()
    # The class of the trainer's process, which verl makes through Ray.
    runner = call.get("task_runner_class")
    check_run(config, runner)
    # A verl that chooses the class itself makes it where nobody can ask the nodes before.
    if runner is not None:
        call = call.changed(task_runner_class=probing(runner))
    with naming_the_trainer():
        return call.hand_on()


def check_run(config: Any, runner: Any) -> None:
    """Check the configuration of a run with gdpo.

    Args:
        runner: the class of the trainer's process, or None for that of verl.

    Raises:
        SettingsError: something cannot work with gdpo, or would be without effect. It has a message
            for each mistake.
    """
    for warning in unread_settings(config):
        warn(warning)
    mistakes: list[str] = []
    with noted(mistakes):
        # What follows cannot see a setting whose key is misspelt.
        unread = find_unread_keys(config, runner)
        mistakes += unread.refusals
        for warning in unread.warnings:
            warn(warning)
    trained = training_sources(config)
    validated = sources_in(config, "val_files")
    mistakes += settings_and_mistakes_of_run(config, trained)[1]
    mistakes += mistakes_beside_the_settings(config)
    if uses_gdpo_manager(config) and trained is not None and validated is not None:
        with noted(mistakes):
            check_sources(config, trained, validated)  # the trainer logs its warnings
    if mistakes:
        raise SettingsError(mistakes)
