"""Why gdpo must not run in this process, and whom that stops: configurations that name gdpo alone.

verl has an estimator and a reward manager `gdpo` of its own. If ours cannot run, verl must not use
its own in our place, and whoever does not use gdpo must notice nothing. `lookup.py` has the places
where verl asks before it makes a trainer.
"""

import sys
from typing import Any

from packaging.version import InvalidVersion, Version

from verl_gdpo import TESTED_VERL
from verl_gdpo.hooks.call import Call

# The keys that may name our estimator or manager. The last one is of versions before 0.9.
NAMED_IN = ("algorithm.adv_estimator", "reward.reward_manager.name", "reward_model.reward_manager")

refusals: list[str] = []  # the reasons; empty if gdpo may run


def versions() -> str:
    """Return the installed version of verl beside those that were tested."""
    return f"verl {sys.modules['verl'].__version__}; tested: {', '.join(TESTED_VERL)}"


def is_tested() -> bool:
    """Return whether the installed verl is one that was tested, or a local build of one."""
    try:
        return Version(sys.modules["verl"].__version__).public in TESTED_VERL
    except InvalidVersion:
        return False


def refuse(reason: str) -> None:
    """Refuse gdpo in this process from now on."""
    whole = f"{reason} ({versions()})"
    if whole not in refusals:
        refusals.append(whole)
        # verl hides the exceptions of plugins, so every process prints the reason here.
        print(f"verl-gdpo: gdpo will not run: {whole}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning."""
    print(f"verl-gdpo: WARNING: {text}", file=sys.stderr, flush=True)


def raise_refusals() -> None:
    """Raise RuntimeError with all reasons, if there are any."""
    if refusals:
        raise RuntimeError("verl-gdpo cannot run: " + "; ".join(refusals))


def names_gdpo(value: Any) -> bool:
    """Return whether this is verl's name for us, or a configuration that has it, or its owner."""
    config = getattr(value, "config", value)
    # Nobody has made a configuration if OmegaConf was never imported.
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is not None and omegaconf.OmegaConf.is_config(config):
        named = [omegaconf.OmegaConf.select(config, key) for key in NAMED_IN]
        return "gdpo" in named
    return isinstance(value, str) and value == "gdpo"


def refuse_or_call(call: Call) -> Any:
    """Stand for a function of ours that cannot be imported."""
    values = [*call.args, *call.kwargs.values()]
    if any(names_gdpo(value) for value in values):
        raise_refusals()
    return call.hand_on()
