"""Why gdpo must not run in this process, and whom that stops: configurations that name gdpo alone.

verl has an estimator and a reward manager `gdpo` of its own. If ours cannot run, verl must not use
its own in our place, and whoever does not use gdpo must notice nothing. So gdpo is refused, or our
parts are looked up, where verl asks before it makes a trainer.

Relies on verl 0.9: verl's main modules call `need_critic(config)`, and so does the constructor of
each trainer; `compute_advantage` looks up the estimator with `core_algos.get_adv_estimator_fn`, and
`resolve_reward_manager_cls` the manager with `get_reward_manager_cls`. Their registries have verl's
own entry `gdpo`, so that `RewardManagerConfig` knows the name.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_gdpo import SUPPORTED_VERL

# the keys that may name our estimator or manager; the last one is of versions before 0.9
NAMED_IN = ("algorithm.adv_estimator", "reward.reward_manager.name", "reward_model.reward_manager")

V1 = "verl.trainer.ppo.v1"
EXPERIMENTAL = "verl.experimental.fully_async_policy"

refusals: list[str] = []  # the reasons; empty if gdpo may run


def versions() -> str:
    """Return the installed version of verl beside the supported ones."""
    return f"verl {sys.modules['verl'].__version__}; supported: verl{SUPPORTED_VERL}"


def refuse(reason: str) -> None:
    """Refuse gdpo in this process from now on."""
    whole = f"{reason} ({versions()})"
    if whole not in refusals:
        refusals.append(whole)
        # verl hides the exceptions of plugins, so every process prints the reason here
        print(f"verl-gdpo: gdpo will not run: {whole}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning."""
    print(f"verl-gdpo: WARNING: {text}", file=sys.stderr, flush=True)


def raise_refusals() -> None:
    """Raise RuntimeError with all reasons, if there are any."""
    if refusals:
        raise RuntimeError("verl-gdpo cannot run: " + "; ".join(refusals))


def names_gdpo(value: Any) -> bool:
    """Whether this is verl's name for us, or a configuration that has it, or an owner of one."""
    config, omegaconf = getattr(value, "config", value), sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        return "gdpo" in [omegaconf.OmegaConf.select(config, key) for key in NAMED_IN]
    return isinstance(value, str) and value == "gdpo"


def refuse_or_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand for a function of ours that cannot be imported."""
    if any(map(names_gdpo, (*args, *kwargs.values()))):
        raise_refusals()
    return original(*args, **kwargs)


def refuse_configuration(need_critic: Callable[..., Any], config: Any) -> Any:
    """Raise if gdpo is configured and cannot run."""
    refuse_gdpo(config)
    return need_critic(config)


def refuse_gdpo(config: Any) -> None:
    """Raise RuntimeError if the configuration names gdpo, and it cannot run with this verl."""
    if names_gdpo(config):
        look_into_newer(bool(config.get("trainer", {}).get("use_v1")))
        raise_refusals()


def find_estimator(get_adv_estimator_fn: Callable[..., Any], name_or_enum: Any) -> Any:
    """Return our estimator for "gdpo"."""
    if name_or_enum != "gdpo":
        return get_adv_estimator_fn(name_or_enum)
    return _ours("hooks.step:compute_gdpo")


def find_manager(get_reward_manager_cls: Callable[..., Any], name: str) -> Any:
    """Return our reward manager for "gdpo"."""
    if name != "gdpo":
        return get_reward_manager_cls(name)
    return _ours("hooks.reward_manager:GdpoRewardManager")


def _mechanism() -> Any:
    from verl_gdpo.hooks import extend  # which imports this module

    return extend


def _ours(replacement: str) -> Any:
    function = _mechanism().load(replacement)
    raise_refusals()
    return function


@functools.cache
def look_into_newer(is_v1: bool) -> None:
    """Refuse a verl that is newer than the supported ones if it lacks what we need, else warn."""
    installed = sys.modules["verl"].__version__
    if refusals or SpecifierSet(SUPPORTED_VERL).contains(installed, prereleases=True):
        return
    mechanism = _mechanism()
    used = [each for each in dict.fromkeys(mechanism.table) if _is_used(each, is_v1)]
    mechanism.say_what_is_missing([each for each in used if each.is_missing()])
    if not refusals:
        print(f"verl-gdpo: gdpo was not tested with this verl ({versions()})", file=sys.stderr)


def _is_used(extension: Any, is_v1: bool) -> bool:
    """Whether a run uses it: a trainer that verl lacks cannot run, so one may lack the other's."""
    if extension.replacement.startswith("cpu."):  # of a machine without a GPU
        return False
    if extension.path.startswith("RayPPOTrainer."):
        return not is_v1
    return not extension.module.startswith((EXPERIMENTAL, V1) if not is_v1 else EXPERIMENTAL)
