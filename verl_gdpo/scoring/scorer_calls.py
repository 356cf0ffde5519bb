"""Calls a scorer: what it raises becomes an error of its sample, and one that hangs is named.

A function that compares the samples of a group is called once for all of them.
"""

import asyncio
import builtins
import concurrent.futures
import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import verl_gdpo
from verl_gdpo.algorithm.values import as_text
from verl_gdpo.scoring.function_list import KEY, PLURAL
from verl_gdpo.terminal import line_of_code

logger = logging.getLogger(__name__)

T = TypeVar("T")

GROUP = getattr(builtins, "BaseExceptionGroup", ())  # since Python 3.11
FIRST_SECONDS = 60.0  # time until the first line about a sample; each next line waits twice as long
POLL_SECONDS = 1.0


class NoAnswerError(TimeoutError):
    """A function has not returned within `reward.timeout`. One of its own is a TimeoutError."""


class ScorerEscape(Exception):
    """Carries an exception that must not leave a scorer's thread or task in its own type."""


@contextmanager
def _contained() -> Iterator[None]:
    """Let each exception of the block reach the coroutine that waits for it, and do nothing else.

    On Python 3.11, a StopIteration would not reach it, a SystemExit would end the process or the
    event loop, and a CancelledError would look like a cancellation of the session by verl.
    """
    try:
        yield
    except (StopIteration, concurrent.futures.CancelledError) as error:
        raise ScorerEscape from error
    except Exception:
        raise
    except BaseException as error:
        raise ScorerEscape from error


def call(function: Callable[..., T], *args: Any) -> T:
    """Call a scorer's function; see `_contained`."""
    with _contained():
        return function(*args)


def in_own_task(scoring: Callable[[], Awaitable[T]]) -> "asyncio.Task[T]":
    """Await `scoring()` in a task of its own: verl cancels who waits, and a scorer does not."""

    async def awaiting() -> T:
        with _contained():
            return await scoring()

    def retrieve(task: "asyncio.Task[T]") -> None:
        """Look at an exception for which nobody waits any more; else asyncio would log it."""
        if not task.cancelled():
            task.exception()

    task = asyncio.ensure_future(awaiting())
    task.add_done_callback(retrieve)
    return task


async def answer_of(task: "asyncio.Task[T]", seconds: float | None = None) -> T:
    """Wait for a task of `in_own_task`, which is cancelled if who waits is, or if it is late.

    Raises:
        NoAnswerError: it has no answer after so many seconds.
    """
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        task.cancel()
        raise NoAnswerError(f"no answer within reward.timeout={seconds} s")
    return task.result()


def describe(error: BaseException, fields: Mapping[str, Any]) -> str:
    """Return one line with the sample, the error and, unless it is ours, the line of code."""
    if isinstance(error, ScorerEscape) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    while isinstance(error, GROUP):
        error = error.exceptions[0]
        frames = traceback.extract_tb(error.__traceback__) or frames
    package = Path(verl_gdpo.__file__).parent
    is_ours = not frames or Path(frames[-1].filename).is_relative_to(package)
    place = "" if is_ours else f" [{line_of_code(frames)}]"
    try:
        reason = as_text(str(error))
    except BaseException:  # its __str__ is the scorer's too
        reason = "its text cannot be read"
    if not isinstance(error, ValueError) or not reason:
        reason = ": ".join(filter(None, [type(error).__name__, reason]))
    return f"reward manager gdpo, {label_of(fields)}: {reason}{place}"


def label_of(fields: Mapping[str, Any]) -> str:
    """Return the name of a sample for messages."""
    info, source = fields.get("extra_info"), str(fields.get("data_source", "?"))
    return (
        f"prompt uid {fields.get('uid', '?')}, data_source {source!r}, "
        f"extra_info.index {info.get('index', '?') if isinstance(info, Mapping) else '?'}"
    )


class Rows:
    """The rows that a reward worker scores at once: the samples of a group, or a row alone.

    is_whole: False for a row that may have a group, and came without it.
    """

    def __init__(self, rows: Iterable[Awaitable[dict[str, Any]]], *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self.rows = [asyncio.ensure_future(each) for each in rows]
        self._calls: dict[str, asyncio.Future[list[Any]]] = {}

    async def result(self, place: int, function: Any, run: Any, is_shared: bool) -> Any:
        """Return the result for a row. The function is called once for all of them.

        is_shared: whether other functions score the rows too.
        """
        if function.name not in self._calls:
            results = self._results(function, run, is_shared)
            self._calls[function.name] = asyncio.ensure_future(results)
        return (await asyncio.shield(self._calls[function.name]))[place]

    async def _results(self, function: Any, run: Any, is_shared: bool) -> list[Any]:
        if not self.is_whole:
            raise ValueError(
                f"{KEY}.{function.name}.group=True: the sample came without its group, which only "
                "the workers of verl's AgentLoopManagerTQ send. Leave out agent_loop_manager_class"
            )
        rows = [await each for each in self.rows]
        group = {PLURAL.get(name, name): value for name, value in rows[0].items()}
        group |= {plural: [row[name] for row in rows] for name, plural in PLURAL.items()}
        results = await run(function, function.call(group, is_shared))
        if not isinstance(results, list) or len(results) != len(rows):
            raise ValueError(
                f"{KEY}.{function.name}: it returned {results!r:.99} for a group of {len(rows)}; "
                "expected a list with a result for each sample, in the same order"
            )
        return results


class SlowScoring:
    """Logs the sample on which a scorer hangs, because training would wait for it silently.

    It watches the samples whose scorer runs in this process, from the moment when it starts.
    A sample that waits for a thread is none of them. The watcher is a thread, because a scorer may
    block the event loop.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._started: dict[int, tuple[float, str]] = {}  # {number: (time, label)}, oldest first
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._next: tuple[int, float] = (-1, FIRST_SECONDS)  # (sample, seconds until its next line)

    @contextmanager
    def of(self, label: str, now: float | None = None) -> Iterator[None]:
        """Watch the sample `label` while the block scores it."""
        with self._lock:
            number = next(self._numbers)
            self._started[number] = (time.monotonic() if now is None else now, label)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._started[number]

    async def wait(self, label: str, scoring: Awaitable[T]) -> T:
        """Await a scorer, and watch its sample."""
        with self.of(label):
            return await scoring

    def overdue(self, now: float) -> str | None:
        """Return a line about the sample that takes longest, or None if no line is due."""
        with self._lock:
            if not self._started:
                return None
            number, (start, label) = next(iter(self._started.items()))
            others = len(self._started) - 1
        due = self._next[1] if self._next[0] == number else FIRST_SECONDS
        seconds = now - start
        if seconds < due:
            return None
        self._next = (number, 2 * seconds)
        return (
            f"a scorer still runs after {seconds:.0f} s: {label}; it also runs for {others} other "
            "samples in this process. Training waits for all of them: give the reward function a "
            "time limit if it may not end"
        )

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            if (line := self.overdue(time.monotonic())) is not None:
                logger.warning("verl-gdpo: %s", line)
