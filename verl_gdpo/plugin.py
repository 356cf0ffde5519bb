"""The module that verl loads. It adds our parts to verl, or prints why gdpo cannot run.

verl loads it at the end of `import verl`, in each process, through the entry point `verl_gdpo` of
the group `verl.plugins` (verl 0.9), through `VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin`, or
through both.

This module imports no other part of verl. `EXTENDS` lists which module of ours extends which module
of verl. Python imports ours right after verl imports its own, and ours then replaces what it
extends. If a version of verl lacks a module, ours is never imported: 0.7.1 and 0.8.0 have no
`verl.trainer.ppo.v1`.
"""

import importlib
import sys
from typing import Any

import verl
import wrapt
from packaging.specifiers import SpecifierSet

from verl_gdpo import SUPPORTED_VERL

EXTENDS = {
    "verl.experimental.reward_loop.reward_manager": "verl_gdpo.verl_hooks.reward_manager",
    "verl.trainer.ppo.metric_utils": "verl_gdpo.verl_hooks.verl_metrics",
    "verl.trainer.ppo.v1": "verl_gdpo.verl_hooks.v1_trainer",
    "verl.trainer.ppo.ray_trainer": "verl_gdpo.verl_hooks.legacy_trainer",
    "verl.trainer.main_ppo": "verl_gdpo.verl_hooks.main_ppo",
    "verl.utils.fsdp_utils": "verl_gdpo.verl_hooks.fused_kernels",
}

# the reasons why gdpo must not run in this process; empty if it may run
refusals: list[str] = []


def replace_estimator(core_algos: Any) -> None:
    """Put our estimator in place of verl's.

    Relies on verl 0.7.1 to 0.9: verl looks up `core_algos.ADV_ESTIMATOR_REGISTRY` at each step.
    """
    core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"] = estimator


def estimator(*args: Any, **kwargs: Any) -> Any:
    """Call our estimator, which is imported at the first call."""
    if refusals:
        raise RuntimeError("verl-gdpo cannot run: " + "; ".join(refusals))
    from verl_gdpo.verl_hooks.estimator import compute_gdpo

    return compute_gdpo(*args, **kwargs)


def _import_after(module: str, ours: str) -> None:
    def import_ours(_: Any) -> None:
        try:
            importlib.import_module(ours)
        except Exception as error:  # verl must keep working for users who do not use gdpo
            _refuse(f"{ours}: {type(error).__name__}: {error}")

    wrapt.register_post_import_hook(import_ours, module)


def _refuse(reason: str) -> None:
    reason = f"{reason} (verl {verl.__version__}; supported: verl{SUPPORTED_VERL})"
    refusals.append(reason)
    # verl hides the exceptions of plugins, so every process prints the reason here
    print(f"verl-gdpo: adv_estimator=gdpo will not run: {reason}", file=sys.stderr, flush=True)


def _activate() -> None:
    if SpecifierSet(SUPPORTED_VERL).contains(verl.__version__, prereleases=True):
        for module, ours in EXTENDS.items():
            _import_after(module, ours)
    else:
        _refuse("this version of verl is not supported")
    wrapt.register_post_import_hook(replace_estimator, "verl.trainer.ppo.core_algos")


_activate()
