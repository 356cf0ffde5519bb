"""verl's platform interface for a machine without an accelerator.

Relies on verl 0.9: verl.plugin.platform.PlatformBase (subclassed). Registered under the name
"cpu" by `plugin.py`, and only there: verl auto-detects every registered platform, so importing
this module must not register it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for a call that only makes sense on an accelerator."""


def _no_bytes(*args: Any, **kwargs: Any) -> int:
    return 0


def host_memory_bytes(*args: Any) -> tuple[int, int]:
    """Free and total bytes of host memory, in the order of torch.cuda.mem_get_info."""
    memory = psutil.virtual_memory()
    return memory.available, memory.total


class CpuDeviceModule(ModuleType):
    """torch.cpu plus the torch.cuda calls that verl makes on `get_torch_device()`."""

    empty_cache = ipc_collect = set_per_process_memory_fraction = staticmethod(_nothing)
    # These count accelerator memory, of which there is none.
    memory_allocated = memory_reserved = staticmethod(_no_bytes)
    max_memory_allocated = max_memory_reserved = staticmethod(_no_bytes)
    mem_get_info = staticmethod(host_memory_bytes)

    @staticmethod
    def get_device_name(*args: Any) -> str:
        return "cpu"

    @staticmethod
    def get_rng_state(*args: Any) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, *args: Any) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        """Fall back on torch.cpu (synchronize, set_device, stream, ...)."""
        try:
            return getattr(torch.cpu, name)
        except AttributeError:
            raise AttributeError(
                f"verl asked the device module for {name!r}, which verl_gdpo.cpu does not have; "
                "the feature in use probably needs a GPU"
            ) from None


_DEVICE_MODULE = CpuDeviceModule("verl_gdpo_cpu_device")


class PlatformCPU(PlatformBase):  # type: ignore[misc, unused-ignore]
    """One logical device per process: the CPU."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False  # opt-in by VERL_PLATFORM only, never by auto-detection

    def current_device(self) -> Any:
        return "cpu"  # verl passes this to torch.device and .to(), where an index means a GPU

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is only one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is finished when its call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The settings are those of the CUDA allocator."""

    def empty_cache(self) -> None:
        """There is no device cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"  # what Ray sets for its logical GPU slots

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "GPU"  # logical slots (ray.init(num_gpus=1)): verl counts only GPU and NPU

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None
