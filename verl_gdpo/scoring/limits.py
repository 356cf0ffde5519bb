"""Limits of requests to a service that scores, over all reward workers of a run together.

The keys are those of verl's manager `rate_limited`, `reward.max_concurrent` and so on. There each
of the `reward.num_workers` processes counts for itself, so that eight of them ask eight times as
often, and a failure scores 0. Here one counter counts for all of them (`hooks/shared_limits.py`),
and a failure is one.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from verl_gdpo.algorithm.settings import SettingsError
from verl_gdpo.scoring.function_list import KEY as FUNCTIONS
from verl_gdpo.scoring.function_list import limited_functions
from verl_gdpo.scoring.scorer_calls import NoAnswerError, answer_of, in_own_task

T = TypeVar("T")

MINUTE = 60.0  # seconds
# Requests of so many seconds may start at once, as in verl.
BURST = 1.0
# A message names so many of the calls that are stuck.
NAMED = 3


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
        SettingsError: one of them is no finite number above 0, or no request could ever begin.
    """
    values = _written_limits(config)
    mistakes = []
    numbers: dict[str, Any] = {}
    for key, value in values.items():
        # A bool is an int in Python. NaN is in no range, and this is written so that it is refused.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            mistakes.append(
                f"reward.{key}={value}: expected a finite number above 0. Leave it out for no limit"
            )
        else:
            numbers[key] = value
    limits = Limits(**numbers)
    if limits.max_concurrent is not None and limits.max_concurrent != int(limits.max_concurrent):
        mistakes.append(f"reward.max_concurrent={limits.max_concurrent}: expected a whole number")
    # Below these two, no request could begin within any minute, and all would wait for ever.
    if limits.max_rpm is not None and limits.max_rpm < 1:
        mistakes.append(f"reward.max_rpm={limits.max_rpm}: expected 1 request a minute or more")
    if limits.max_tpm is not None and limits.max_tpm < limits.estimated_tokens_per_request:
        mistakes.append(
            f"reward.max_tpm={limits.max_tpm}: one request takes more, "
            f"reward.estimated_tokens_per_request={limits.estimated_tokens_per_request}. Set it to "
            "the tokens of a request, or raise max_tpm"
        )
    if mistakes:
        raise SettingsError(mistakes)
    if not values:
        return None
    return limits


def _written_limits(config: Any) -> dict[str, Any]:
    """Return {key: value} of the limits that have one in the configuration."""
    values = {}
    for key in KEYS:
        value = config.reward.get(key)
        if value is not None:
            values[key] = value
    return values


def check_limits(config: Any) -> Limits | None:
    """Return the limits of requests of a run with our reward manager; None for none.

    Raises:
        ValueError: they hold for no function, or a function asks for some and there are none.
    """
    limits = limits_of(config)
    asking = limited_functions(config)
    # A function that a run has alone is always limited, so it needs no key that asks for it.
    is_alone = config.reward.custom_reward_function.path is not None
    if limits and not asking and not is_alone:
        written = ", ".join(f"reward.{k}={v}" for k, v in _written_limits(config).items())
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
        if at_once is None:
            at_once = most
        self._what = what
        self._most = most
        self._at_once = at_once
        self._seconds = seconds
        self._numbers = count()
        self._held: set[int] = set()
        self._stuck: dict[int, str] = {}  # {place: label}
        self._all_stuck_since = 0.0
        # Who has the turn is the first of those who wait, so only one waits for a change.
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
        # As long as one call is not stuck, it will end or be marked, and tell of it.
        if self._seconds is None or len(self._stuck) < self._most:
            await self._changed.wait()
            return
        left = self._all_stuck_since + self._seconds - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(self._changed.wait(), left)
        except asyncio.TimeoutError:
            raise AllStuckError(self._all_stuck()) from None

    def _all_stuck(self) -> str:
        """Return the message for whoever waits while all calls are stuck."""
        labels = list(self._stuck.values())
        named = "; ".join(labels[:NAMED])
        if len(labels) > NAMED:
            named += f"; and {len(labels) - NAMED} more"
        return (
            f"all {self._most} {self._what} are held by calls that had no answer within "
            f"reward.timeout={self._seconds} s, and that do not end: {named}. Nothing can be "
            "scored any more. Give what the function waits for a time limit of its own, below "
            "reward.timeout"
        )


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
        """Wait until fewer requests than `per_minute` count."""
        clock = asyncio.get_running_loop().time
        while True:
            while self._begun and self._begun[0] + MINUTE <= clock():
                self._begun.popleft()
            if len(self._allowed) + len(self._begun) < self._most:
                return
            if self._begun:
                # The oldest makes room first, because a request that begins meanwhile is younger.
                await asyncio.sleep(self._begun[0] + MINUTE - clock())
            else:
                # All were allowed and none has begun: only a beginning starts a minute.
                self._changed.clear()
                await self._changed.wait()

    async def _wait_for_due(self) -> None:
        """Wait until so long after the request before that all are spread over the minute."""
        now = asyncio.get_running_loop().time()
        # Of an idle time, at most a burst counts as saved.
        saved = max(0.0, BURST - self._gap)
        self._due = max(self._due, now - saved)
        if self._due > now:
            await asyncio.sleep(self._due - now)
        self._due += self._gap


class RequestCounter(Protocol):
    """What counts the requests of a run: a `Counter`, or what asks one in another process."""

    async def allow(self) -> int: ...

    def begin(self, request: int) -> None: ...

    def mark_stuck(self, request: int, label: str) -> None: ...

    def end(self, request: int) -> None: ...


class Counter:
    """Lets a request begin when all limits allow it; first come, first served."""

    def __init__(self, limits: Limits) -> None:
        self._numbers = count()
        self._places: Places | None = None
        if limits.max_concurrent is not None:
            most = int(limits.max_concurrent)
            what = f"places of reward.max_concurrent={most}"
            self._places = Places(what, most, seconds=limits.timeout)
        self._rate: Rate | None = None
        per_minute = limits.per_minute()
        if per_minute is not None:
            self._rate = Rate(per_minute)

    async def allow(self) -> int:
        """Wait for all limits, and return the number of the request.

        Raises:
            AllStuckError: see `Places`.
        """
        if self._places is None:
            request = next(self._numbers)
        else:
            request = await self._places.take()
        if self._rate is not None:
            try:
                await self._rate.take(request)
            except BaseException:
                # Who waits for the rate may be cancelled, and has a place already.
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
    """Calls functions within the limits of a run.

    limits: None for none.
    make_counter: makes what counts the requests, when the first of them comes. By default this
        process counts its own alone.
    """

    def __init__(
        self, limits: Limits | None, make_counter: Callable[[Limits], RequestCounter] = Counter
    ) -> None:
        self.limits = limits
        self._make_counter = make_counter
        self._counter: RequestCounter | None = None

    @property
    def timeout(self) -> float | None:
        if self.limits is None:
            return None
        return self.limits.timeout

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
        # A manager that only checks its configuration sends no request and needs no counter.
        if self._counter is None:
            self._counter = self._make_counter(self.limits)
        counter = self._counter
        request = await counter.allow()

        async def begin() -> T:
            # It is noted inside of the task, because a function that blocks the event loop may
            # hold up the task's start.
            counter.begin(request)
            return await scoring()

        task = in_own_task(begin)
        task.add_done_callback(lambda _: counter.end(request))
        try:
            return await answer_of(task, self.limits.timeout)
        except NoAnswerError:
            counter.mark_stuck(request, label)
            raise
