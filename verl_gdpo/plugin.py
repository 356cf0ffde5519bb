"""The module that verl loads. It adds our parts to verl, or makes gdpo stop with the reason.

verl loads it at the end of `import verl`, in each process, through the entry point `verl_gdpo` of
the group `verl.plugins`, through `VERL_USE_EXTERNAL_MODULES=verl_gdpo.plugin`, or through both.

`EXTENDS` lists which module of ours extends which module of verl. Python imports ours right after
verl imports its own, and ours then replaces what it extends. One that extends several modules of
verl has a function for each, named behind a colon. If verl lacks a module, ours is never imported:
verl's branch `neo` cannot import `verl.trainer.ppo.v1`.

A verl that is newer than the supported versions is asked for all names that a run uses, once a
configuration names gdpo. If it has them, a line says that nobody has tested it.

If gdpo cannot run, verl must not use its own estimator and manager of the same name in our place.
So both are replaced, and `GATES` refuse a configuration that names one of them: functions to which
verl passes it at the start of its main modules, and in the constructor of each trainer.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import verl
import wrapt
from packaging.specifiers import SpecifierSet

from verl_gdpo import SUPPORTED_VERL
from verl_gdpo.run import stacks

EXTENDS = {
    "verl.experimental.agent_loop.agent_loop": "agent_loop",
    "verl.experimental.fully_async_policy.fully_async_rollouter": "fully_async:extend_rollouter",
    "verl.experimental.fully_async_policy.fully_async_trainer": "fully_async:extend_trainer",
    "verl.experimental.reward_loop.reward_manager": "reward_manager",
    "verl.models.transformers.monkey_patch": "attention:register",
    "verl.trainer.ppo.metric_utils": "legacy_batch:extend_metrics",
    "verl.trainer.ppo.v1": "v1_trainer",
    "verl.trainer.ppo.reward": "legacy_batch:extend_reward",
    "verl.trainer.ppo.ray_trainer": "legacy_trainer",
    "verl.trainer.main_ppo": "driver:extend_main_ppo",
    "verl.utils.device": "driver:extend_device",
    "verl.utils.fsdp_utils": "fused_kernels",
}
GATES = {"verl.utils.device": "auto_set_device", "verl.trainer.ppo.utils": "need_critic"}
# the keys that may name our estimator or manager; the last one is of versions before 0.9
NAMED_IN = ("algorithm.adv_estimator", "reward.reward_manager.name", "reward_model.reward_manager")

# the reasons why gdpo must not run in this process; empty if it may run
refusals: list[str] = []


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    """Raise RuntimeError with the reasons why gdpo cannot run, if there are any."""
    if refusals:
        raise RuntimeError("verl-gdpo cannot run: " + "; ".join(refusals))


def estimator(*args: Any, **kwargs: Any) -> Any:
    """Call our estimator, which is imported at the first call."""
    refuse()
    from verl_gdpo.hooks.estimator import compute_gdpo

    return compute_gdpo(*args, **kwargs)


def replace_estimator(core_algos: Any) -> None:
    """Put our estimator in place of verl's, which looks it up at each step."""
    with suppress(AttributeError):  # in a version that is refused
        core_algos.ADV_ESTIMATOR_REGISTRY["gdpo"] = estimator


def refuse_manager(reward_manager: Any) -> None:
    """Let nobody make verl's own manager `gdpo` if ours cannot run."""
    if refusals:
        with suppress(AttributeError):
            reward_manager.registry.REWARD_MANAGER["gdpo"] = refuse


def refuse_configurations(verls: Any) -> None:
    """Extend the gate in this module of verl to raise if gdpo is configured and cannot run."""
    name = GATES[verls.__name__]
    gate = getattr(verls, name, None)
    if gate is None:  # in a version that is refused
        return

    @functools.wraps(gate)
    def refuse_or_go_on(config: Any) -> Any:
        from omegaconf import OmegaConf

        if "gdpo" in [OmegaConf.select(config, key) for key in NAMED_IN]:
            look_into_newer(bool(OmegaConf.select(config, "trainer.use_v1")))
            refuse()
        return gate(config)

    setattr(verls, name, refuse_or_go_on)


@functools.cache
def look_into_newer(is_v1: bool) -> None:
    """Refuse a verl that is newer than the supported ones if it lacks a name, else warn."""
    if refusals or SpecifierSet(SUPPORTED_VERL).contains(verl.__version__, prereleases=True):
        return
    from verl_gdpo.hooks.relied_on import RELIED_ON, missing

    # a trainer that verl lacks cannot run, so only the configured one needs its part
    others = {"fully_async", "legacy_trainer" if is_v1 else "v1_trainer"}
    parts = [ours for ours in EXTENDS.values() if ours.partition(":")[0] not in others]
    if lacking := missing(name for ours in parts for name in RELIED_ON[ours]):
        _refuse(f"verl has no {', '.join(lacking)} ({_versions()})")
    else:
        print(f"verl-gdpo: gdpo was not tested with this verl ({_versions()})", file=sys.stderr)


def _importing(ours: str) -> Callable[[Any], None]:
    name, _, function = ours.partition(":")

    def import_ours(verls: Any) -> None:
        if refusals:
            return
        try:
            from verl_gdpo.hooks.relied_on import RELIED_ON, missing

            if lacking := missing(RELIED_ON[ours]):
                raise ImportError(f"verl has no {', '.join(lacking)}")
            module = importlib.import_module(f"verl_gdpo.hooks.{name}")
            if function:
                getattr(module, function)(verls)
        except Exception as error:  # verl must keep working for users who do not use gdpo
            _refuse(f"verl_hooks.{ours}: {type(error).__name__}: {error} ({_versions()})")

    return import_ours


def _versions() -> str:
    return f"verl {verl.__version__}; supported: verl{SUPPORTED_VERL}"


def _refuse(reason: str) -> None:
    refusals.append(reason)
    # verl hides the exceptions of plugins, so every process prints the reason here
    print(f"verl-gdpo: gdpo will not run: {reason}", file=sys.stderr, flush=True)


def _activate() -> None:
    try:
        importlib.import_module("verl_gdpo.hooks")
    except ImportError as error:
        _refuse(str(error))
    else:
        stacks.register()
        for module, ours in EXTENDS.items():
            wrapt.register_post_import_hook(_importing(ours), module)
    for module, change in (
        ("verl.trainer.ppo.core_algos", replace_estimator),
        ("verl.experimental.reward_loop.reward_manager", refuse_manager),
        *((module, refuse_configurations) for module in GATES),
    ):
        wrapt.register_post_import_hook(change, module)


_activate()
