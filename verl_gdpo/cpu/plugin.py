"""Entry point `verl_gdpo_cpu` of the group `verl.plugins`: lets verl 0.9 run without a GPU.

verl imports this module at the end of `import verl`, in every process. It acts only if the
environment says VERL_PLATFORM=cpu: a CPU-only head node of a GPU cluster must never pick up the
CPU platform. verl hides a plugin's exception in its debug log, so it is printed here first.

What is changed in verl 0.9, each right after the module has been imported:

- verl.plugin.platform.PlatformRegistry: gets the platform "cpu" (public).
- the variable VERL_ENGINE_DEVICE, read by verl.workers.engine.base.EngineRegistry: verl registers
  its FSDP engine for cuda and npu only; it runs on CPU just the same.
- verl.utils.distributed.initialize_global_process_group and initialize_global_process_group_ray:
  both build the backend "cpu:gloo,cpu:gloo", which torch rejects as naming a device twice.
- verl.utils.fsdp_utils: see `verl_gdpo.verl_hooks.fused_kernels`. The recipe for the CPU needs it.
- verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy: pinned host memory, which verl asks
  for in the reference model, needs an accelerator.
- verl's rollouts get "hf"; see `patching.register_rollout`.
- verl.trainer.ppo.v1.replay_buffer.ReplayBuffer: polls every 2 s, with no key to change it; a step
  of a tiny model takes less than that.
"""

import functools
import importlib
import os
from types import ModuleType
from typing import Any

from verl_gdpo import SUPPORTED_VERL
from verl_gdpo.cpu.patching import (
    after_import,
    register_rollout,
    report_failure,
    require,
)

BACKEND = "cpu:gloo"
POLL_INTERVAL_SECONDS = 0.1


def activate() -> bool:
    """Set verl up for the CPU if VERL_PLATFORM=cpu; returns whether it did.

    Raises:
        ImportError: verl lacks something that this module replaces; names it.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":  # normalised as verl does
        return False
    _register_platform()
    os.environ.setdefault("VERL_ENGINE_DEVICE", "cuda")
    for name, patch in (
        ("verl.utils.distributed", _patch_process_group),
        ("verl.utils.fsdp_utils", _let_fused_kernels_run),
        ("verl.workers.engine.fsdp.transformer_impl", _patch_offload_policy),
        ("verl.trainer.ppo.v1.replay_buffer", _shorten_poll),
    ):
        after_import(name, patch)
    register_rollout("hf", "verl_gdpo.cpu.rollout", "HFReplica", "HFServerAdapter")
    return True


def _register_platform() -> None:
    try:
        import verl.plugin.platform as platform
    except ImportError as error:
        raise ImportError(
            f"verl_gdpo.cpu needs verl.plugin.platform ({error}); supported: verl {SUPPORTED_VERL}"
        ) from error
    register = require(platform, "PlatformRegistry.register", "platform")
    from verl_gdpo.cpu.device import PlatformCPU

    register(platform="cpu")(PlatformCPU)


def _patch_process_group(module: ModuleType) -> None:
    require(module, "initialize_global_process_group", "timeout_second")
    original = require(module, "initialize_global_process_group_ray", "timeout_second", "backend")

    def initialize_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or BACKEND)

    def initialize(timeout_second: int = 36000) -> tuple[int, int, int]:
        initialize_ray(timeout_second)
        local_rank, rank, world_size = (
            int(os.environ[name]) for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
        )
        return local_rank, rank, world_size

    vars(module).update(
        initialize_global_process_group_ray=initialize_ray,
        initialize_global_process_group=initialize,
    )


def _let_fused_kernels_run(_module: ModuleType) -> None:
    """Also where the plugin `verl_gdpo` is not loaded; an import twice does it once."""
    importlib.import_module("verl_gdpo.verl_hooks.fused_kernels")


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


report_failure(activate)()
