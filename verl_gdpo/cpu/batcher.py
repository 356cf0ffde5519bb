"""Groups concurrent asyncio requests into batches, runs them in a thread, and can abort them.

Abort and resume follow verl's contract for partial rollouts (verl 0.9:
vLLMHttpServer.abort_all_requests, FullyAsyncLLMServerClient.generate): the running responses
come back unfinished, and requests wait until `resume`.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

from verl_gdpo.cpu.sampler import Completion, Request

# Runs a batch; must return one outcome a request, and ask the given function whether to stop.
RunBatch = Callable[[Sequence[Request], Callable[[], bool]], list[Completion | Exception]]


class Batcher:
    """Feeds `run` with batches of up to `max_batch` requests, one batch at a time.

    A batch starts once no request has arrived for `quiet_s` seconds, or after `max_wait_s`. Must
    be used from one event loop.
    """

    def __init__(
        self, run: RunBatch, *, max_batch: int, quiet_s: float = 0.02, max_wait_s: float = 0.5
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch: got {max_batch}, expected at least 1")
        self._run = run
        self._max_batch, self._quiet_s, self._max_wait_s = max_batch, quiet_s, max_wait_s
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._running = 0
        self._worker: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._abort = threading.Event()
        #: Held while a batch runs: whoever changes the model takes it first.
        self.idle = asyncio.Lock()

    async def submit(self, request: Request) -> Completion:
        """Wait for the response; raises what the model raised for this request."""
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def abort(self) -> int:
        """Stop the running batch and start no other until `resume`; returns how many it stopped.

        Returns after the batch has ended.
        """
        self._open.clear()
        aborted = self._running
        self._abort.set()
        async with self.idle:
            self._abort.clear()
        return aborted

    def resume(self) -> None:
        """Let batches start again."""
        self._open.set()

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._open.wait()
                await self._gather_burst()
                async with self.idle:
                    if self._open.is_set():  # an abort may have closed it while we waited
                        await self._run_one_batch()
        except BaseException as error:  # nobody may wait for a worker that is gone
            for _, future in self._waiting:
                _settle(future, RuntimeError(f"the rollout's batch worker died: {error!r}"))
            self._waiting = []
            raise

    async def _gather_burst(self) -> None:
        deadline = time.monotonic() + self._max_wait_s
        seen = 0
        while seen < len(self._waiting) < self._max_batch and time.monotonic() < deadline:
            seen = len(self._waiting)
            await asyncio.sleep(self._quiet_s)

    async def _run_one_batch(self) -> None:
        waiting = [(r, f) for r, f in self._waiting if not f.done()]  # done: the caller has left
        batch, self._waiting = waiting[: self._max_batch], waiting[self._max_batch :]
        self._running = len(batch)
        try:
            outcomes = await asyncio.to_thread(self._run, [r for r, _ in batch], self._abort.is_set)
        except Exception as error:
            outcomes = [_batch_error(error, len(batch)) for _ in batch]
        except BaseException:  # cancelled: hand the batch to _work, which fails whoever waits
            self._waiting = batch + self._waiting
            raise
        finally:
            self._running = 0
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            _settle(future, outcome)


def _batch_error(cause: Exception, count: int) -> RuntimeError:
    error = RuntimeError(f"generating a batch of {count} responses failed: {cause!r}")
    error.__cause__ = cause
    return error


def _settle(future: "asyncio.Future[Completion]", outcome: Completion | Exception) -> None:
    if future.done():
        return
    if isinstance(outcome, Completion):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
