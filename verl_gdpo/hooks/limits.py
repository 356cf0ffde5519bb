"""Limits of requests to a service that scores, over all reward workers of a run together.

The keys are those of verl's manager `rate_limited`, `reward.max_concurrent` and so on. There each
of the `reward.num_workers` processes counts for itself, so that eight of them ask eight times as
often, and a failure scores 0. Here one actor of Ray counts, and a failure is one.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from verl_gdpo.hooks.function_list import KEY as FUNCTIONS
from verl_gdpo.hooks.function_list import limited_functions

T = TypeVar("T")

ACTOR = "verl_gdpo"  # its name continues with the limits
BURST = 1.0  # seconds whose requests may start at once, as in verl
MOST_WAITING = 1_000_000  # coroutines of the actor


class Limits(NamedTuple):
    """The limits of a run; None for no limit. `timeout` counts from the end of the waiting."""

    max_concurrent: int | None = None
    max_rpm: float | None = None
    max_tpm: float | None = None
    estimated_tokens_per_request: float = 2000
    timeout: float | None = None


KEYS = Limits._fields


def limits_of(config: Any) -> Limits | None:
    """Return the limits that a configuration has; None for none.

    Raises:
        ValueError: one of them is no number above 0.
    """
    values = {key: config.reward.get(key) for key in KEYS}
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"reward.{key}={value}: expected a number above 0")
    return Limits(**values) if values else None


def check_limits(config: Any) -> Limits | None:
    """Return the limits of requests of a run with our reward manager; None for none.

    Raises:
        ValueError: they hold for no function, or a function asks for some and there are none.
    """
    limits, asking = limits_of(config), limited_functions(config)
    if limits and not asking and config.reward.custom_reward_function.path is None:
        values = {key: config.reward.get(key) for key in KEYS}
        written = ", ".join(f"reward.{k}={v}" for k, v in values.items() if v is not None)
        raise ValueError(
            f"{written}: no function asks for limits. Set {FUNCTIONS}.NAME.limited=True for those "
            "that call a service, or leave the limits out"
        )
    if asking and not limits:
        raise ValueError(
            f"{FUNCTIONS}.{asking[0]} asks a service, and there are no limits. Set one or more of "
            f"{', '.join(f'+reward.{key}' for key in KEYS)}"
        )
    return limits


class Counter:
    """Lets a request begin when all limits allow it; first come, first served.

    `sleep` and `clock` are those of a test.
    """

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._places = asyncio.Semaphore(limits.max_concurrent) if limits.max_concurrent else None
        tokens = limits.estimated_tokens_per_request
        rates = ((limits.max_rpm, 1.0), (limits.max_tpm, tokens))
        # the seconds that a request takes of each rate
        self._seconds = [cost * 60 / rate for rate, cost in rates if rate is not None]
        self._due = [-float("inf")] * len(self._seconds)  # when each rate is used up to

    async def begin(self) -> None:
        """Wait for all limits. A request that waits for its rate has no place."""
        wait, now = 0.0, self._clock()
        for number, seconds in enumerate(self._seconds):
            start = max(self._due[number], now - BURST)
            self._due[number] = start + seconds
            wait = max(wait, start + min(seconds, BURST) - now)
        if wait > 0:
            await self._sleep(wait)
        if self._places is not None:
            await self._places.acquire()

    def end(self) -> None:
        if self._places is not None:
            self._places.release()


class Limiter:
    """The counter of a run, which is an actor where Ray runs, and else in this process.

    limits: None for none.
    """

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits
        self._counter: Any = None

    async def call(self, scoring: Callable[[], Awaitable[T]]) -> T:
        """Await `scoring()` within the limits.

        Raises:
            TimeoutError: it has taken more than `timeout` seconds, without the waiting.
        """
        if self.limits is None:
            return await scoring()
        async with self._place(self.limits):
            try:
                return await asyncio.wait_for(scoring(), self.limits.timeout)
            except asyncio.TimeoutError as error:
                seconds = self.limits.timeout
                raise TimeoutError(f"no answer within reward.timeout={seconds} s") from error

    @asynccontextmanager
    async def _place(self, limits: Limits) -> AsyncIterator[None]:
        import ray  # takes a second, and most readers of `limits_of` have none

        if not ray.is_initialized():
            self._counter = self._counter or Counter(limits)
            await self._counter.begin()
            try:
                yield
            finally:
                self._counter.end()
            return
        if self._counter is None:
            name = f"{ACTOR} {limits}"
            options = {"name": name, "get_if_exists": True, "num_cpus": 0}
            actor = ray.remote(Counter).options(**options, max_concurrency=MOST_WAITING)
            self._counter = actor.remote(limits)
        begun, end = self._counter.begin.remote(), self._counter.end.remote
        try:
            await begun
        except asyncio.CancelledError:  # of who waits; the actor goes on, and gives the place
            begun.future().add_done_callback(lambda _: end())
            raise
        try:
            yield
        finally:
            end()
