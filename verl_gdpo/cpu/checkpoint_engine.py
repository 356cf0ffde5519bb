"""The checkpoint engine "gloo": sends the trainer's weights to a rollout with workers of its own.

verl's asynchronous trainers need one, and verl's own need GPUs. Relies on verl 0.9
verl.checkpoint_engine.base: for each update, CheckpointEngineManager calls `prepare` in all
workers, gives what `build_topology` makes of the answers to their `init_process_group`, and then
calls `send_weights` in the trainer, `receive_weights` in the rollout, and `finalize` in all.

Names, shapes and types go through a TCPStore of the first trainer worker, one tensor after the
other, so that no more than one is held. The tensors go through a process group of its own: the
default one exists already, and has the trainer's workers or the rollout's alone.
"""

import json
from collections.abc import AsyncGenerator, Iterable, Sequence
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

TIMEOUT = timedelta(minutes=10)
Address = tuple[str, int]  # The host and the port of a TCPStore.


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):  # type: ignore[misc, unused-ignore]
    """One worker's end of it. The first worker of the trainer is the master, rank 0."""

    def __init__(self, bucket_size: int, is_master: bool = False, **extra: Any) -> None:
        # verl's bucket_size is not needed: a bucket here is one tensor.
        self.is_master = is_master
        self._store: Any = None
        # It stays None in those workers of the trainer that send nothing.
        self._group: Any = None

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
        world_size = 1 + rollout_world_size
        address = metadata[0]

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            """Return the arguments of `init_process_group`, a value for each worker."""
            return {
                "rank": ranks,
                "world_size": [world_size] * len(ranks),
                "address": [address] * len(ranks),
            }

        trainer_ranks = [0]
        trainer_ranks.extend([-1] * (actor_wg_world_size - 1))
        rollout_ranks = list(range(1, world_size))
        return arguments(trainer_ranks), arguments(rollout_ranks)

    def init_process_group(self, rank: int, world_size: int, address: Address) -> None:
        if rank < 0:
            return
        if self._store is None:
            host, port = address
            self._store = TCPStore(host, port, timeout=TIMEOUT)
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
            dtype_name = str(tensor.dtype).removeprefix("torch.")
            self._store.set(str(number), json.dumps([name, tensor.shape, dtype_name]))
            self._group.broadcast(tensor, 0).wait()
            number += 1
        if self._group is not None:
            self._store.set(str(number), json.dumps(None))

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        number = 0
        while True:
            header = json.loads(self._store.get(str(number)))
            if header is None:
                return
            name, shape, dtype_name = header
            tensor = torch.empty(shape, dtype=getattr(torch, dtype_name))
            self._group.broadcast(tensor, 0).wait()
            yield name, tensor
            number += 1

    def finalize(self) -> None:
        self._group = None
        self._store = None
