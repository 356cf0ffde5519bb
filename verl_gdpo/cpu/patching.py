"""How `cpu` changes verl 0.9: right after the module concerned has been imported.

Relies on verl 0.9: verl.workers.rollout.replica.RolloutReplicaRegistry (public),
verl.workers.rollout.base._ROLLOUT_REGISTRY (private; verl has no function to register), and
verl.experimental.agent_loop.agent_loop.AgentLoopWorker._run_agent_loop, which gets `session_id`
from the V1 trainer and does not tell the rollout.
"""

import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from verl_gdpo import SUPPORTED_VERL


def register_rollout(name: str, module: str, replica: str, adapter: str) -> None:
    """Let `actor_rollout_ref.rollout.name=NAME` choose two classes of `module`, imported then.

    Each request has one sampling option more, "session": which sample of its prompt it is. The
    order in which the samples of a prompt arrive differs from run to run.
    """

    def load_replica() -> type:
        cls: type = getattr(importlib.import_module(module), replica)
        return cls

    def add_replica(verls: ModuleType) -> None:
        require(verls, "RolloutReplicaRegistry.register", "name", "loader")(name, load_replica)

    def add_adapter(verls: ModuleType) -> None:
        require(verls, "_ROLLOUT_REGISTRY")[(name, "async")] = f"{module}.{adapter}"

    def name_sessions(verls: ModuleType) -> None:
        original = require(verls, "AgentLoopWorker._run_agent_loop", "sampling_params")

        @functools.wraps(original)
        async def run(self: Any, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
            if self.config.actor_rollout_ref.rollout.name == name and "session_id" in kwargs:
                sampling_params = {**sampling_params, "session": kwargs["session_id"]}
            return await original(self, sampling_params, *args, **kwargs)

        verls.AgentLoopWorker._run_agent_loop = run

    after_import("verl.experimental.agent_loop.agent_loop", name_sessions)
    after_import("verl.workers.rollout.replica", add_replica)
    after_import("verl.workers.rollout.base", add_adapter)


def after_import(name: str, patch: Callable[[ModuleType], None]) -> None:
    """Call `patch` with the module `name` as soon as it has been imported."""
    from wrapt import register_post_import_hook

    register_post_import_hook(report_failure(patch), name)


def report_failure(function: Callable[..., Any]) -> Callable[..., Any]:
    """Print what `function` raises: verl and Ray may hide it."""

    def reporting(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            print("verl_gdpo: changing verl failed:", file=sys.stderr)
            traceback.print_exc(file=sys.stderr)
            raise

    return reporting


def require(module: ModuleType, symbol: str, *parameters: str) -> Any:
    """Return `module.symbol` after checking that it exists and takes `parameters`."""
    value: Any = module
    for part in symbol.split("."):
        value = getattr(value, part, None)
    missing = value is None or any(p not in inspect.signature(value).parameters for p in parameters)
    if missing:
        import verl

        arguments = f"({', '.join(parameters)})" if parameters else ""
        raise ImportError(
            f"verl_gdpo.cpu needs {module.__name__}.{symbol}{arguments}, which verl "
            f"{getattr(verl, '__version__', '?')} does not have; supported: verl {SUPPORTED_VERL}"
        )
    return value
