"""How verl picks us up, and why it rejects us.

Loaded by the entry point `verl_gdpo` of the group `verl.plugins` (verl 0.9), by
`VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin`, or both: at the end of `import verl`, in each process.
No part of verl is imported for it. Each module of ours in `EXTENDS` is imported right after verl
has imported the module that ours extends, and puts itself in place then. A version of verl that
lacks a module never gets there: 0.7.1 and 0.8.0 have no `verl.trainer.ppo.v1`.
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

# why gdpo must not run in this process; empty when all is well
refusals: list[str] = []


def replace_estimator(core_algos: Any) -> None:
    """Relies on verl 0.7.1 to 0.9: `core_algos.ADV_ESTIMATOR_REGISTRY`, read at each step."""
    core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"] = estimator


def estimator(*args: Any, **kwargs: Any) -> Any:
    """Our estimator; the import waits for the first call."""
    if refusals:
        raise RuntimeError("verl-gdpo cannot run: " + "; ".join(refusals))
    from verl_gdpo.verl_hooks.estimator import compute_gdpo

    return compute_gdpo(*args, **kwargs)


def _import_after(module: str, ours: str) -> None:
    def import_ours(_: Any) -> None:
        try:
            importlib.import_module(ours)
        except Exception as error:  # must not break the verl of somebody who does not use gdpo
            _refuse(f"{ours}: {type(error).__name__}: {error}")

    wrapt.register_post_import_hook(import_ours, module)


def _refuse(reason: str) -> None:
    reason = f"{reason} (verl {verl.__version__}; supported: verl{SUPPORTED_VERL})"
    refusals.append(reason)
    # verl hides what a plugin raises, so it is said here, in every process
    print(f"verl-gdpo: adv_estimator=gdpo will not run: {reason}", file=sys.stderr, flush=True)


def _activate() -> None:
    if SpecifierSet(SUPPORTED_VERL).contains(verl.__version__, prereleases=True):
        for module, ours in EXTENDS.items():
            _import_after(module, ours)
    else:
        _refuse("this version of verl is not supported")
    wrapt.register_post_import_hook(replace_estimator, "verl.trainer.ppo.core_algos")


_activate()
