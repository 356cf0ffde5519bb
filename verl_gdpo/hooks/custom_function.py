"""Loads `reward.custom_reward_function` as `scoring/reward_file.py` does, in a run with gdpo.

Relies on verl 0.9: `get_custom_reward_fn(config)` in `verl.trainer.ppo.reward` loads the file
before the reward manager is made, takes pkg://MODULE for a module that is imported, and adds the
function's `reward_kwargs`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.hooks.before_training import runs_gdpo_manager
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.refusal import names_gdpo
from verl_gdpo.scoring.response import parts_taken_by
from verl_gdpo.scoring.reward_file import PACKAGE_PREFIX
from verl_gdpo.scoring.reward_functions import ARGUMENTS, ROUTER, module_with

KEY = "reward.custom_reward_function"


def load_custom_function(call: Call) -> Any:
    """Return verl's result with our module; without gdpo, verl loads the file.

    Raises:
        ValueError: the file cannot be loaded, or has no function that can be called.
    """
    config = call["config"]
    path = OmegaConf.select(config, f"{KEY}.path")
    if not path or not _is_with_gdpo(config):
        return call.hand_on()
    # What verl would refuse in its workers is refused here, with the reason.
    name = config.reward.custom_reward_function.name
    module = module_with(KEY, path, name)
    options = config.reward.custom_reward_function.get("reward_kwargs") or {}
    given = [*ARGUMENTS]
    if OmegaConf.select(config, "reward.reward_model.enable"):
        given += ROUTER
    _check_signature(f"{KEY}.name={name}", getattr(module, name), given, options)
    # Of a module that is imported already, verl takes the function, and adds the options.
    imported = deepcopy(config)
    imported.reward.custom_reward_function.path = f"{PACKAGE_PREFIX}{module.__name__}"
    return call.changed(config=imported).hand_on()


def _check_signature(
    where: str, function: Callable[..., Any], given: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Raise ValueError for a function that does not take what verl calls it with.

    Args:
        given: the keywords of verl's.
        options: those of the configuration.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:
        # Some functions that are written in C tell nothing of their arguments.
        return
    # `answer_str` and `reasoning_str` are passed only to functions that name them.
    names = [*given, *options, *parts_taken_by(function)]
    try:
        # The values do not matter: nothing is called.
        signature.bind(**dict.fromkeys(names))
    except TypeError as error:
        keywords = ", ".join([*given, *options])
        raise ValueError(
            f"{where}: {error}; it takes {signature}. verl calls it with the keywords "
            f"{keywords}: write compute_score({', '.join(given)}, **kwargs)"
        ) from error


def _is_with_gdpo(config: Any) -> bool:
    """Return whether the estimator or the reward manager is ours.

    `verl.trainer.main_eval` loads a function too, and its configuration has neither.
    """
    if names_gdpo(config):
        return True
    return "reward_manager" in config.reward and runs_gdpo_manager(config)
