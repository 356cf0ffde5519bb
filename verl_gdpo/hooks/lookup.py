"""Where verl asks for gdpo before it makes a trainer: it gets ours, or the reasons why not.

Relies on verl 0.9: verl's main modules call `need_critic(config)`, and so does the constructor of
each trainer; `compute_advantage` looks up the estimator with `core_algos.get_adv_estimator_fn`, and
`resolve_reward_manager_cls` the manager with `get_reward_manager_cls`. Their registries have verl's
own entry `gdpo`, so that `RewardManagerConfig` knows the name.
"""

import functools
import sys
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_gdpo import SUPPORTED_VERL
from verl_gdpo.hooks import extend
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.extend import Extension
from verl_gdpo.hooks.refusal import names_gdpo, raise_refusals, refusals, versions

V1 = "verl.trainer.ppo.v1"
EXPERIMENTAL = "verl.experimental.fully_async_policy"
LEGACY_TRAINER = "RayPPOTrainer."


def refuse_configuration(call: Call) -> Any:
    """Raise RuntimeError if gdpo is configured and cannot run."""
    refuse_gdpo(call["config"])
    return call.hand_on()


def refuse_gdpo(config: Any) -> None:
    """Raise RuntimeError if the configuration names gdpo, and it cannot run with this verl."""
    if names_gdpo(config):
        look_into_newer(bool(config.get("trainer", {}).get("use_v1")))
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
    function = extend.load(replacement)
    raise_refusals()
    return function


@functools.cache
def look_into_newer(is_v1: bool) -> None:
    """Refuse a verl that is newer than the supported ones if it lacks what we need, else warn.

    Args:
        is_v1: whether the run has verl's V1 trainer.
    """
    installed = sys.modules["verl"].__version__
    if refusals or SpecifierSet(SUPPORTED_VERL).contains(installed, prereleases=True):
        return
    missing = []
    for extension in dict.fromkeys(extend.table):
        if _is_used(extension, is_v1) and extension.is_missing():
            missing.append(extension)
    extend.say_what_is_missing(missing)
    if not refusals:
        print(f"verl-gdpo: gdpo was not tested with this verl ({versions()})", file=sys.stderr)


def _is_used(extension: Extension, is_v1: bool) -> bool:
    """Return whether a run uses it.

    A trainer that verl lacks cannot run. So a run with one trainer may lack what the other needs.
    """
    if extension.table == "cpu":  # of a machine without a GPU
        return False
    if extension.module.startswith(EXPERIMENTAL):
        return False
    if extension.path.startswith(LEGACY_TRAINER):
        return not is_v1
    if extension.module.startswith(V1):
        return is_v1
    return True
