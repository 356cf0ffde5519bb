"""The threads of a scorer: so many work at once, and a few more are stuck.

Nobody can end a thread. If a function does not return in time, its sample fails and its thread is
stuck: another one takes over its work. Python would wait at its exit for a stuck thread of
`concurrent.futures`; these threads are daemons.
"""

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple

from verl_gdpo.scoring.limits import Places

logger = logging.getLogger(__name__)

# So many threads of a scorer may be stuck in a process, before nothing can be scored any more.
MOST_STUCK = 64
NAME = "verl-gdpo scorer"


def usual_threads() -> int:
    """Return how many threads an executor of `concurrent.futures` has by default."""
    return min(32, (os.cpu_count() or 1) + 4)


class _Call(NamedTuple):
    """A call that a thread makes, and the future of the event loop that waits for it.

    asyncio's own way, `wrap_future`, would replace a TimeoutError by one without its line of code.
    """

    function: Callable[[], Any]
    answer: "asyncio.Future[Any]"

    def make(self) -> None:
        give: Callable[[Any], None]
        given: Any
        try:
            given = self.function()
            give = self.answer.set_result
        except BaseException as error:
            given = error
            give = self.answer.set_exception
        # If the event loop is closed, nobody waits for the answer.
        with suppress(RuntimeError):
            self.answer.get_loop().call_soon_threadsafe(give, given)


class Threads:
    """Threads that only one scorer has. All methods belong to one event loop.

    scorer: its name, for messages.
    at_once: how many functions run at the same time, without those that are stuck; None for the
        number of `concurrent.futures`.
    seconds: how long to wait, once all threads are stuck, for one to come back; None for ever.
    """

    def __init__(
        self, scorer: str, at_once: int | None = None, seconds: float | None = None
    ) -> None:
        self.scorer = scorer
        if at_once is None:
            at_once = usual_threads()
        self.most = max(at_once, MOST_STUCK)
        self.places = Places(f"threads of {scorer}", self.most, at_once, seconds)
        self._idle = 0
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        # The threads end with this object: None is the last call that they get.
        weakref.finalize(self, self._calls.put, None)

    async def reserve(self) -> "ReservedThread":
        """Wait for a thread that nobody uses; first come, first served.

        Raises:
            AllStuckError: all threads are stuck, and none has come back within `seconds`.
        """
        return ReservedThread(self, await self.places.take())

    def start(self, function: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Call a function in an idle thread, or in a new one, and return its future result."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # An idle thread waits at the queue. Which of them takes the call does not matter.
        if self._idle > 0:
            self._idle -= 1
        else:
            thread = threading.Thread(target=_work, args=(self._calls,), name=NAME, daemon=True)
            thread.start()
        self._calls.put(_Call(function, answer))
        return answer

    def end(self, place: int) -> None:
        """Take back the thread of a function that has ended."""
        self._idle += 1
        self.places.give_back(place)


class ReservedThread:
    """A thread for one call. Either `start` or `give_back` has to follow."""

    def __init__(self, threads: Threads, place: int) -> None:
        self._threads = threads
        self._place = place
        self._answer: asyncio.Future[Any] | None = None

    def start(self, function: Callable[[], Any]) -> "asyncio.Future[Any]":
        """Call a function. The thread is free for others when it has ended."""
        self._answer = self._threads.start(function)
        self._answer.add_done_callback(lambda _: self._threads.end(self._place))
        return self._answer

    def give_back(self) -> None:
        """Give the thread back if no call has started in it."""
        if self._answer is None:
            self._threads.places.give_back(self._place)

    def mark_stuck(self, label: str) -> None:
        """Note that nobody waits for the call any more. It does nothing if the call has ended."""
        if self._answer is None or self._answer.done():
            return
        stuck = self._threads.places.mark_stuck(self._place, label)
        logger.warning(
            "verl-gdpo: %s did not return in time, and its thread cannot be ended: %s; %d of at "
            "most %d threads of this process are stuck in it",
            self._threads.scorer,
            label,
            stuck,
            self._threads.most,
        )


def _work(calls: "SimpleQueue[_Call | None]") -> None:
    """Make calls until there are none for ever."""
    while True:
        call = calls.get()
        if call is None:
            # It also ends the next thread.
            calls.put(None)
            return
        call.make()
        # An idle thread must not keep a sample in memory.
        del call
