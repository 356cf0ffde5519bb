"""Limits of requests to a service that scores, over all reward workers of a run together.

The keys are those of verl's manager `rate_limited`, `reward.max_concurrent` and so on. There each
of the `reward.num_workers` processes counts for itself, so that eight of them ask eight times as
often, and a failure scores 0. Here one actor of Ray counts, and a failure is one.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple, TypeVar

from verl_gdpo.scoring.function_list import KEY as FUNCTIONS
from verl_gdpo.scoring.function_list import limited_functions
from verl_gdpo.scoring.scorer_calls import NoAnswerError, answer_of, in_own_task

T = TypeVar("T")

ACTOR = "verl_gdpo"  # its name continues with the limits
MINUTE = 60.0  # seconds
BURST = 1.0  # seconds whose requests may start at once, as in verl
MOST_WAITING = 1_000_000  # coroutines of the actor
NAMED = 3  # stuck calls in a message


class AllStuckError(RuntimeError):
    """Nothing can be scored any more. No `on_error` holds for it: it ends the run."""


class Limits(NamedTuple):
    """The limits of a run; None for no limit. `timeout` counts from the start of the function."""

    max_concurrent: int | None = None
    max_rpm: float | None = None
    max_tpm: float | None = None
    estimated_tokens_per_request: float = 2000
    timeout: float | None = None

    def per_minute(self) -> int | None:
        """Return how many requests may begin within any 60 s; None for no limit."""
        allowed = []
        if self.max_rpm is not None:
            allowed.append(math.floor(self.max_rpm))
        if self.max_tpm is not None:
            allowed.append(math.floor(self.max_tpm / self.estimated_tokens_per_request))
        return min(allowed, default=None)


KEYS = Limits._fields


def limits_of(config: Any) -> Limits | None:
    """Return the limits that a configuration has; None for none.

    Raises:
        ValueError: one of them is no number above 0, or no request could ever begin.
    """
    values = {key: config.reward.get(key) for key in KEYS}
    values = {key: value for key, value in values.items() if value is not None}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"reward.{key}={value}: expected a number above 0")
    if not values:
        return None
    limits = Limits(**values)
    if limits.max_concurrent is not None and limits.max_concurrent != int(limits.max_concurrent):
        raise ValueError(f"reward.max_concurrent={limits.max_concurrent}: expected a whole number")
    if limits.max_rpm is not None and limits.max_rpm < 1:
        raise ValueError(f"reward.max_rpm={limits.max_rpm}: expected 1 request a minute or more")
    if limits.max_tpm is not None and limits.max_tpm < limits.estimated_tokens_per_request:
        raise ValueError(
            f"reward.max_tpm={limits.max_tpm}: one request takes more, "
            f"reward.estimated_tokens_per_request={limits.estimated_tokens_per_request}. Set it to "
            "the tokens of a request, or raise max_tpm"
        )
    return limits


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


class Places:
    """Places for calls, first come, first served. A call has one until it has really ended.

    A call is stuck if nobody waits for it any more, and it goes on. It keeps its place.

    what: the name of the places, for messages.
    most: how many there are.
    at_once: how many calls may have one that are not stuck; None for `most`.
    seconds: how long to wait, once all calls are stuck, for one of them to end; None for ever.
    """

    def __init__(
        self, what: str, most: int, at_once: int | None = None, seconds: float | None = None
    ) -> None:
        self._what = what
        self._most = most
        self._at_once = most if at_once is None else at_once
        self._seconds = seconds
        self._numbers = count()
        self._held: set[int] = set()
        self._stuck: dict[int, str] = {}  # {place: label}
        self._all_stuck_since = 0.0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    async def take(self) -> int:
        """Wait for a place, and return its number.

        Raises:
            AllStuckError: all calls are stuck, and none has ended within `seconds`.
        """
        async with self._turn:
            while not self._is_free():
                await self._change()
            place = next(self._numbers)
            self._held.add(place)
            return place

    def mark_stuck(self, place: int, label: str) -> int:
        """Note that a call goes on though nobody waits for it, and return how many do.

        It does nothing if the place was given back meanwhile.
        """
        if place in self._held:
            self._stuck[place] = label
            self._all_stuck_since = asyncio.get_running_loop().time()
            self._changed.set()
        return len(self._stuck)

    def give_back(self, place: int) -> None:
        self._held.discard(place)
        self._stuck.pop(place, None)
        self._changed.set()

    def _is_free(self) -> bool:
        working = len(self._held) - len(self._stuck)
        return len(self._held) < self._most and working < self._at_once

    async def _change(self) -> None:
        """Wait until a call is stuck or has ended. Only who has the turn waits here."""
        self._changed.clear()
        if self._seconds is None or len(self._stuck) < self._most:
            await self._changed.wait()
            return
        left = self._all_stuck_since + self._seconds - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except asyncio.TimeoutError:
            labels = list(self._stuck.values())
            others = len(labels) - NAMED
            more = f"; and {others} more" if others > 0 else ""
            raise AllStuckError(
                f"all {self._most} {self._what} are held by calls that had no answer within "
                f"reward.timeout={self._seconds} s, and that do not end: "
                f"{'; '.join(labels[:NAMED])}{more}. Nothing can be scored any more. Give what "
                "the function waits for a time limit of its own, below reward.timeout"
            ) from None


class Rate:
    """Lets at most so many requests begin within any 60 s, evenly but for bursts of a second.

    A request may begin long after it was allowed to, as where a function blocks the event loop of
    its worker. So it counts from its permission until 60 s after it has begun.
    """

    def __init__(self, per_minute: int) -> None:
        self._most = per_minute
        self._gap = MINUTE / per_minute  # seconds between two requests
        self._allowed: set[int] = set()  # requests that have not begun
        self._begun: deque[float] = deque()  # the times, oldest first, of the last 60 s
        self._due = -math.inf  # when the next request is due
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    async def take(self, request: int) -> None:
        """Wait until a request may begin; first come, first served."""
        async with self._turn:
            await self._wait_for_room()
            await self._wait_for_due()
            self._allowed.add(request)

    def begin(self, request: int) -> None:
        """Note that a request begins now."""
        if request in self._allowed:
            self._allowed.remove(request)
            self._begun.append(asyncio.get_running_loop().time())
            self._changed.set()

    async def _wait_for_room(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            while self._begun and self._begun[0] + MINUTE <= clock():
                self._begun.popleft()
            if len(self._allowed) + len(self._begun) < self._most:
                return
            if self._begun:
                await asyncio.sleep(self._begun[0] + MINUTE - clock())
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _wait_for_due(self) -> None:
        now = asyncio.get_running_loop().time()
        saved = max(0.0, BURST - self._gap)  # of an idle time, at most this much counts
        self._due = max(self._due, now - saved)
        if self._due > now:
            await asyncio.sleep(self._due - now)
        self._due += self._gap


class Counter:
    """Lets a request begin when all limits allow it; first come, first served."""

    def __init__(self, limits: Limits) -> None:
        self._numbers = count()
        self._places: Places | None = None
        if limits.max_concurrent is not None:
            most = int(limits.max_concurrent)
            what = f"places of reward.max_concurrent={most}"
            self._places = Places(what, most, seconds=limits.timeout)
        per_minute = limits.per_minute()
        self._rate = None if per_minute is None else Rate(per_minute)

    async def allow(self) -> int:
        """Wait for all limits, and return the number of the request.

        Raises:
            AllStuckError: see `Places`.
        """
        request = next(self._numbers) if self._places is None else await self._places.take()
        if self._rate is not None:
            try:
                await self._rate.take(request)
            except BaseException:
                self.end(request)
                raise
        return request

    def begin(self, request: int) -> None:
        """Note that a request begins now."""
        if self._rate is not None:
            self._rate.begin(request)

    def mark_stuck(self, request: int, label: str) -> None:
        """Note that nobody waits for a request any more, and that it goes on."""
        if self._places is not None:
            self._places.mark_stuck(request, label)

    def end(self, request: int) -> None:
        """Give the place of a request back. One that never began counts as if it had."""
        self.begin(request)
        if self._places is not None:
            self._places.give_back(request)


class Limiter:
    """The counter of a run, which is an actor where Ray runs, and else in this process.

    limits: None for none.
    """

    def __init__(self, limits: Limits | None) -> None:
        self.limits = limits
        self._counter: Any = None

    @property
    def timeout(self) -> float | None:
        return None if self.limits is None else self.limits.timeout

    async def call(self, scoring: Callable[[], Awaitable[T]], label: str) -> T:
        """Await `scoring()` within the limits, in a task of its own.

        It holds its place until it has ended, also if it is cancelled or late.

        Args:
            label: the name of the sample and the function, for messages.

        Raises:
            NoAnswerError: it has taken more than `timeout` seconds, without the waiting.
            AllStuckError: all places are held by calls that do not end.
        """
        if self.limits is None:
            return await answer_of(in_own_task(scoring))
        counter = self._counter_or_actor(self.limits)
        request = await counter.allow()

        async def begin() -> T:
            # here, because a function that blocks the event loop may hold up the task's start
            counter.begin(request)
            return await scoring()

        task = in_own_task(begin)
        task.add_done_callback(lambda _: counter.end(request))
        try:
            return await answer_of(task, self.limits.timeout)
        except NoAnswerError:
            counter.mark_stuck(request, label)
            raise

    def _counter_or_actor(self, limits: Limits) -> Any:
        import ray  # takes a second, and most readers of `limits_of` have none

        if self._counter is None:
            self._counter = _ActorCounter(limits) if ray.is_initialized() else Counter(limits)
        return self._counter


class _ActorCounter:
    """The counter that all reward workers share, with the methods of `Counter`."""

    def __init__(self, limits: Limits) -> None:
        import ray

        name = f"{ACTOR} {limits}"
        options = {"name": name, "get_if_exists": True, "num_cpus": 0}
        counter = ray.remote(Counter).options(**options, max_concurrency=MOST_WAITING)
        self.actor = counter.remote(limits)

    async def allow(self) -> int:
        allowed = self.actor.allow.remote()
        try:
            return await allowed  # type: ignore[no-any-return]
        except asyncio.CancelledError:  # of who waits; the actor goes on, and gives the place
            allowed.future().add_done_callback(self._refuse)
            raise
        except AllStuckError as error:  # the text of Ray's own copy is a traceback
            raise AllStuckError(str(getattr(error, "cause", error))) from None

    def _refuse(self, allowed: Any) -> None:
        if allowed.exception() is None:
            self.end(allowed.result())

    def begin(self, request: int) -> None:
        self.actor.begin.remote(request)

    def mark_stuck(self, request: int, label: str) -> None:
        self.actor.mark_stuck.remote(request, label)

    def end(self, request: int) -> None:
        self.actor.end.remote(request)
