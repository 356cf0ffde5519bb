"""Entry point `verl_gdpo_cpu` of the group `verl.plugins`: lets verl 0.9 run without a GPU.

verl imports this module at the end of `import verl`, in every process. It acts only if the
environment says VERL_PLATFORM=cpu: a CPU-only head node of a GPU cluster must never pick up the
CPU platform. verl hides a plugin's exception in its debug log, so it is printed here first.

What is changed in verl 0.9, each right after the module has been imported:

- verl.plugin.platform.PlatformRegistry: gets the platform "cpu" (public).
- the variable VERL_ENGINE_DEVICE, read by verl.workers.engine.base.EngineRegistry: verl registers
  its FSDP engine for cuda and npu only; it runs on CPU just the same.
- verl.utils.distributed.initialize_global_process_group_ray: builds the backend
  "cpu:gloo,cpu:gloo", which torch rejects as naming a device twice.
- verl.utils.fsdp_utils: see `verl_gdpo.hooks.fused_kernels`. The recipe for the CPU needs it.
- verl.utils.fsdp_utils.fsdp2_sharded_save_to_cpu: keeps weights for later by moving them to the
  CPU, which does not copy what is there already.
- verl.checkpoint_engine: gets the checkpoint engine "gloo".
- verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy: pinned host memory, which verl asks
  for in the reference model, needs an accelerator.
- verl.workers.rollout.replica.RolloutReplicaRegistry (public) and
  verl.workers.rollout.base._ROLLOUT_REGISTRY (private; verl has no function to register): get the
  rollout "hf".
- verl.experimental.agent_loop.agent_loop.AgentLoopWorker._run_agent_loop: gets `session_id` from
  the V1 trainer and does not tell the rollout.
- verl.trainer.ppo.v1.replay_buffer.ReplayBuffer: polls every 2 s, with no key to change it; a step
  of a tiny model takes less than that.
"""

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from operator import attrgetter
from types import ModuleType
from typing import Any

from wrapt import register_post_import_hook

from verl_gdpo import SUPPORTED_VERL
from verl_gdpo.cpu import vllm_rollout

BACKEND = "cpu:gloo"
POLL_INTERVAL_SECONDS = 0.1


def activate() -> None:
    """Set verl up for the CPU if VERL_PLATFORM=cpu.

    Raises:
        ImportError: verl lacks something that this module replaces; names it.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":  # normalised as verl does
        return
    _register_platform()
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    vllm_rollout.name_distribution()
    for name, patch in (
        ("verl.utils.distributed", _patch_process_group),
        ("verl.utils.fsdp_utils", _let_fused_kernels_run),
        ("verl.utils.fsdp_utils", _copy_saved_weights),
        ("verl.checkpoint_engine", _add_checkpoint_engine),
        ("verl.workers.engine.fsdp.transformer_impl", _patch_offload_policy),
        ("verl.trainer.ppo.v1.replay_buffer", _shorten_poll),
        ("vllm.model_executor.layers.utils", vllm_rollout.keep_weights),
    ):
        after_import(name, patch)
    register_rollout("hf", "verl_gdpo.cpu.rollout", "HFReplica", "HFServerAdapter")


def _register_platform() -> None:
    register = require("verl.plugin.platform", "PlatformRegistry.register", "platform")
    from verl_gdpo.cpu.device import PlatformCPU

    register(platform="cpu")(PlatformCPU)


def _patch_process_group(module: ModuleType) -> None:
    original = require(module, "initialize_global_process_group_ray", "timeout_second", "backend")

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or BACKEND)

    vars(module)["initialize_global_process_group_ray"] = initialize


def _let_fused_kernels_run(_module: ModuleType) -> None:
    """Also where the plugin `verl_gdpo` is not loaded; an import twice does it once."""
    importlib.import_module("verl_gdpo.hooks.fused_kernels")


def _copy_saved_weights(module: ModuleType) -> None:
    original = require(module, "fsdp2_sharded_save_to_cpu", "model")

    def save_copies(model: Any) -> Any:
        shards, spec = original(model)
        return {name: (shard.clone(), own) for name, (shard, own) in shards.items()}, spec

    vars(module)["fsdp2_sharded_save_to_cpu"] = save_copies


def _add_checkpoint_engine(module: ModuleType) -> None:
    require(module, "CheckpointEngineRegistry.register", "backend")
    importlib.import_module("verl_gdpo.cpu.checkpoint_engine")


def _patch_offload_policy(module: ModuleType) -> None:
    original = require(module, "CPUOffloadPolicy", "pin_memory")

    def unpinned(pin_memory: bool = False) -> Any:
        return original(pin_memory=False)

    vars(module)["CPUOffloadPolicy"] = unpinned


def _shorten_poll(module: ModuleType) -> None:
    original = require(module, "ReplayBuffer.__init__", "poll_interval")

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"poll_interval": POLL_INTERVAL_SECONDS, **kwargs})

    vars(module)["ReplayBuffer"].__init__ = init


def register_rollout(name: str, module: str, replica: str, adapter: str) -> None:
    """Let `actor_rollout_ref.rollout.name=NAME` choose two classes of `module`, imported then.

    Each request has one sampling option more, "session": which sample of its prompt it is. The
    order in which the samples of a prompt arrive differs from run to run.
    """

    def add_replica(verls: ModuleType) -> None:
        register = require(verls, "RolloutReplicaRegistry.register", "name", "loader")
        register(name, lambda: getattr(importlib.import_module(module), replica))

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


def require(module: ModuleType | str, symbol: str, *parameters: str) -> Any:
    """Return `module.symbol` after checking that it exists and takes `parameters`."""
    import verl

    from verl_gdpo.hooks.relied_on import missing

    name = module if isinstance(module, str) else module.__name__
    arguments = f"({','.join(parameters)})" if parameters else ""
    if missing([f"{name}:{symbol}{arguments}"]):
        raise ImportError(
            f"verl_gdpo.cpu needs {name}.{symbol}{arguments}, which verl "
            f"{verl.__version__} does not have; supported: verl {SUPPORTED_VERL}"
        )
    return attrgetter(symbol)(sys.modules[name])


report_failure(activate)()
