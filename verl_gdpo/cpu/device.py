"""verl's platform interface for a machine without an accelerator.

Relies on verl 0.9: verl.plugin.platform.platform_cuda.PlatformCUDA (subclassed). Registered under
the name "cpu" by `plugin.py`, and only there: verl auto-detects every registered platform, so
importing this module must not register it.
"""

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA


def _nothing(*_args: Any, **_options: Any) -> None:
    """Stand-in for a call that only makes sense on an accelerator."""


def host_memory_bytes(*_args: Any) -> tuple[int, int]:
    """Free and total bytes of host memory, in the order of torch.cuda.mem_get_info."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


class CpuDeviceModule(ModuleType):
    """torch.cpu plus the torch.cuda calls that verl makes on `get_torch_device()`."""

    empty_cache = ipc_collect = set_per_process_memory_fraction = staticmethod(_nothing)
    # The memory of accelerators, of which there are none.
    memory_allocated = memory_reserved = staticmethod(lambda *_: 0)
    max_memory_allocated = max_memory_reserved = memory_allocated
    mem_get_info = staticmethod(host_memory_bytes)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        """Fall back on torch.cpu (synchronize, set_device, stream, ...)."""
        return getattr(torch.cpu, name)


class PlatformCPU(PlatformCUDA):  # type: ignore[misc, unused-ignore]
    """One logical device per process: the CPU. There is no cache, no profiler and no IPC.

    verl counts only GPU and NPU, so Ray has logical GPUs (ray.init(num_gpus=1)), as with CUDA, and
    sets CUDA_VISIBLE_DEVICES.
    """

    device_name = vendor_name = "cpu"
    device_module = CpuDeviceModule("verl_gdpo_cpu_device")

    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Only VERL_PLATFORM chooses this platform, never auto-detection.
        return False

    def current_device(self) -> Any:
        # verl passes this to torch.device and .to(), where an index means a GPU.
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> AbstractContextManager[None]:
        return nullcontext()

    def is_ipc_supported(self) -> bool:
        return False
