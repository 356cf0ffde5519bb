"""What a machine without an accelerator needs: verl's platform, and a checkpoint engine.

Relies on verl 0.9: verl.plugin.platform.platform_cuda.PlatformCUDA (subclassed). `plugin.py`
registers it under the name "cpu", and importing this module must not: verl auto-detects every
registered platform.

The checkpoint engine "gloo" sends the trainer's weights to a rollout with workers of its own, which
verl's asynchronous trainers need; verl's own need GPUs. Relies on verl 0.9
verl.checkpoint_engine.base: for each update, CheckpointEngineManager calls `prepare` in all
workers, gives what `build_topology` makes of the answers to their `init_process_group`, and then
calls `send_weights` in the trainer, `receive_weights` in the rollout, and `finalize` in all.
Names, shapes and types go through a TCPStore of the first trainer worker, one tensor after the
other, so that no more than one is held. The tensors go through a process group of its own: the
default one exists already, and has the trainer's workers or the rollout's alone.
"""

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from types import ModuleType
from typing import Any

import psutil
import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
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
    # of accelerators, of which there are none
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
        return False  # opt-in by VERL_PLATFORM only, never by auto-detection

    def current_device(self) -> Any:
        return "cpu"  # verl passes this to torch.device and .to(), where an index means a GPU

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


TIMEOUT = timedelta(minutes=10)
Address = tuple[str, int]  # host and port


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """One worker's end of it. The first worker of the trainer is the master, rank 0."""

    def __init__(self, bucket_size: int, is_master: bool = False, **extra: Any) -> None:
        # verl's bucket_size is not needed: a bucket here is one tensor
        self.is_master = is_master
        self._store: Any = None
        self._group: Any = None  # None in those workers of the trainer that send nothing

    def prepare(self) -> Address | None:
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return host, self._store.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Address | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Number the first trainer worker and all of the rollout; the others get -1."""
        size = 1 + rollout_world_size
        idle = [-1] * (actor_wg_world_size - 1)

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            places = [metadata[0]] * len(ranks)
            return {"rank": ranks, "world_size": [size] * len(ranks), "address": places}

        return arguments([0, *idle]), arguments([*range(1, size)])

    def init_process_group(self, rank: int, world_size: int, address: Address) -> None:
        if rank < 0:
            return
        if self._store is None:
            self._store = TCPStore(*address, timeout=TIMEOUT)
        self._group = ProcessGroupGloo(self._store, rank, world_size, TIMEOUT)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Send (name, tensor) pairs; each worker of the trainer has to make them all together."""
        number = 0
        for name, weight in weights:
            if self._group is None:
                continue
            tensor = weight.detach().cpu().contiguous()
            form = str(tensor.dtype).removeprefix("torch.")
            self._store.set(str(number), json.dumps([name, tensor.shape, form]))
            self._group.broadcast(tensor, 0).wait()
            number += 1
        if self._group is not None:
            self._store.set(str(number), json.dumps(None))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        number = 0
        while (header := json.loads(self._store.get(str(number)))) is not None:
            name, shape, form = header
            tensor = torch.empty(shape, dtype=getattr(torch, form))
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor
            number += 1

    def finalize(self) -> None:
        self._group = self._store = None
