"""Where verl asks for gdpo before it makes a trainer: it gets ours, or the reasons why not.

Relies on verl 0.9: verl's main modules call `need_critic(config)`, and so does the constructor of
each trainer; `compute_advantage` looks up the estimator with `core_algos.get_adv_estimator_fn`, and
`resolve_reward_manager_cls` the manager with `get_reward_manager_cls`. Their registries have verl's
own entry `gdpo`, so that `RewardManagerConfig` knows the name.
"""

import functools
import sys
from typing import Any

from verl_gdpo.hooks import extend, net
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import Extension
from verl_gdpo.hooks.refusal import (
    is_tested,
    names_gdpo,
    raise_refusals,
    refusals,
    versions,
    warn,
)

V1 = "verl.trainer.ppo.v1"
FULLY_ASYNC = "verl.experimental.fully_async_policy"
ONE_STEP_OFF = "verl.experimental.one_step_off_policy"
LEGACY_TRAINER = "RayPPOTrainer."


def refuse_configuration(call: Call) -> Any:
    """Raise RuntimeError if gdpo is configured and cannot run."""
    config = call["config"]
    refuse_gdpo(config)
    # verl's main module has called `check_and_set_device` by now.
    if names_gdpo(config):
        net.warn_of_idle_start()
    return call.hand_on()


def refuse_gdpo(config: Any) -> None:
    """Raise RuntimeError if the configuration names gdpo, and it cannot run with this verl."""
    if names_gdpo(config):
        look_into_untested(is_v1=bool(config.get("trainer", {}).get("use_v1")))
        raise_refusals()


def find_estimator(call: Call) -> Any:
    """Return our estimator for "gdpo"."""
    if call["name_or_enum"] != "gdpo":
        return call.hand_on()
    return _ours("verl_gdpo.hooks.estimator:compute_gdpo")


def find_manager(call: Call) -> Any:
    """Return our reward manager for "gdpo"."""
    if call["name"] != "gdpo":
        return call.hand_on()
    return _ours("verl_gdpo.hooks.reward_manager:GdpoRewardManager")


def _ours(replacement: str) -> Any:
    # An import of ours that fails has added its reason to the refusals.
    function = extend.load(replacement)
    raise_refusals()
    return function


@functools.cache
def look_into_untested(*, is_v1: bool) -> None:
    """Refuse a verl that was not tested if it lacks what a run needs, else warn; once a process.

    Args:
        is_v1: whether the configuration asks for verl's V1 trainer.
    """
    if refusals or is_tested():
        return
    # A row may stand there twice, and is looked for once.
    used = [each for each in dict.fromkeys(extend.table) if _is_used(each, is_v1)]
    missing = [each for each in used if each.is_missing()]
    extend.say_what_is_missing(missing)
    # The caller raises them. Whatever else could be said would hide the reason.
    if refusals:
        return
    for extension in used:
        unknown = extension.unknown_parameters()
        if unknown:
            warn(
                f"{extension.module}:{extension.path} of this verl also needs "
                f"{', '.join(unknown)}, which verl-gdpo does not know, and hands on"
            )
    print(f"verl-gdpo: gdpo was not tested with this verl ({versions()})", file=sys.stderr)


def _is_used(extension: Extension, is_v1: bool) -> bool:
    """Return whether a run uses it.

    A run with one trainer may lack what another needs. The asynchronous trainers of
    `verl.experimental` are legacy trainers, whatever the configuration says, and their main module
    is loaded by now.
    """
    if extension.table == "cpu":  # of a machine without a GPU
        return False
    if extension.module.startswith(FULLY_ASYNC):
        return FULLY_ASYNC in sys.modules
    # Both asynchronous trainers derive from the legacy one.
    if extension.path.startswith(LEGACY_TRAINER):
        return not is_v1 or FULLY_ASYNC in sys.modules or ONE_STEP_OFF in sys.modules
    if extension.module.startswith(V1):
        return is_v1
    return True
