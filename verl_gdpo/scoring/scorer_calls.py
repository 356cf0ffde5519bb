"""Calls a scorer: what it raises becomes an error of its sample, and one that hangs is named.

A function that compares the samples of a group is called once for all of them.
"""

import asyncio
import builtins
import concurrent.futures
import functools
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
from verl_gdpo.scoring.function_list import KEY, OF_RESPONSE, OF_STEP, PLURAL
from verl_gdpo.scoring.response import arguments_for
from verl_gdpo.tasks import Task
from verl_gdpo.terminal import OF_PYTHON, line_of_code

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Python 3.10 has no groups of exceptions, and `isinstance(error, ())` is false.
GROUP = getattr(builtins, "BaseExceptionGroup", ())
# Folders of installed packages; Debian has the second.
INSTALLED = {"site-packages", "dist-packages"}
# The first line about a sample comes after so many seconds. Each next one waits twice as long.
FIRST_SECONDS = 60.0
POLL_SECONDS = 1.0


class NoAnswerError(TimeoutError):
    """A function has not returned within `reward.timeout`. One of its own is a TimeoutError."""


class FunctionFailed(Exception):
    """A function of the list failed on a sample. `__cause__` is what it raised.

    file: where the function is written, None if nobody knows.
    """

    def __init__(self, name: str, file: str | None) -> None:
        super().__init__(name)
        self.name = name
        self.file = file


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
        # All others reach the coroutine as they are.
        raise
    except BaseException as error:
        raise ScorerEscape from error


def call(function: Callable[..., T], *args: Any) -> T:
    """Call a scorer's function; see `_contained`."""
    with _contained():
        return function(*args)


def call_of_task(
    task: Task, row: Mapping[str, Any], options: Mapping[str, Any]
) -> functools.partial[Any]:
    """Return the call of a task's scorer for a row, alone or in a list.

    Args:
        row: all that a function may take.
        options: of the scorer.
    """
    text, told = arguments_for(task, row[OF_RESPONSE])
    # The first two go by position: a scorer may name them as it likes.
    return functools.partial(
        task.score,
        text,
        row["ground_truth"],
        response_tokens=row["extra_info"]["response_tokens"],
        step=row[OF_STEP],
        **told,
        **options,
    )


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
    """Return one line with the sample, the error and, unless it is ours, the line of code.

    For a function of the list, it also has the function's name, and what else may be done.
    """
    prefix = f"reward manager gdpo, {label_of(fields)}: "
    advice = ""
    file = None
    if isinstance(error, FunctionFailed) and error.__cause__ is not None:
        key = f"{KEY}.{error.name}"
        prefix += f"{key}: "
        advice = (
            f". To go on without its reward for such a sample: +{key}.on_error=missing; "
            f"without the sample: +{key}.on_error=drop"
        )
        file = error.file
        error = error.__cause__
    if isinstance(error, ScorerEscape) and error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    # Of a group of exceptions, the first says more than the group.
    while isinstance(error, GROUP):
        error = error.exceptions[0]
        # An exception that was never raised has no frames, so those of its group are kept.
        frames = traceback.extract_tb(error.__traceback__) or frames
    return f"{prefix}{_reason(error)}{_place(frames, file)}{advice}"


def _place(frames: traceback.StackSummary, file: str | None) -> str:
    """Return the line of code where a scorer failed; "" for our own code.

    Args:
        file: where the scorer is written, None if nobody knows.
    """
    # Our own messages say what to do, and a line of ours would not help.
    if not frames or _is_ours(frames[-1]):
        return ""
    # A line of a library says where the library noticed it, and not what the user wrote.
    users = []
    of_file = []
    for frame in frames:
        if frame.filename == file:
            of_file.append(frame)
        if not _is_ours(frame) and not _is_installed(frame):
            users.append(frame)
    if users or of_file:
        return f" [{line_of_code(users or of_file)}]"
    return f" [{file or line_of_code(frames)}]"


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return Path(frame.filename).is_relative_to(Path(verl_gdpo.__file__).parent)


def _is_installed(frame: traceback.FrameSummary) -> bool:
    """Whether a line stands in Python's own library, or in an installed package."""
    if frame.filename.startswith(OF_PYTHON):
        return True
    return not INSTALLED.isdisjoint(Path(frame.filename).parts)


def _reason(error: BaseException) -> str:
    """Return the text of an error, with its type unless it is a ValueError with a text."""
    try:
        reason = as_text(str(error))
    except BaseException:
        # Its method `__str__` is the scorer's too, and may do anything.
        reason = "its text cannot be read"
    if not reason:
        return type(error).__name__
    if isinstance(error, ValueError):
        return reason
    return f"{type(error).__name__}: {reason}"


def label_of(fields: Mapping[str, Any]) -> str:
    """Return the name of a sample for messages."""
    # A row may lack a column, and the message about another error must not fail on that.
    uid = fields.get("uid", "?")
    source = str(fields.get("data_source", "?"))
    index = "?"
    info = fields.get("extra_info")
    if isinstance(info, Mapping):
        index = info.get("index", "?")
    return f"prompt uid {uid}, data_source {source!r}, extra_info.index {index}"


class Rows:
    """The rows that a reward worker scores at once: the samples of a group, or a row alone.

    is_whole: False for a row that may have a group, and came without it.
    """

    def __init__(self, rows: Iterable[Awaitable[dict[str, Any]]], *, is_whole: bool) -> None:
        self.is_whole = is_whole
        # A row is decoded once, whoever asks for it first.
        self.rows = [asyncio.ensure_future(each) for each in rows]
        # {name of a function of the group: its results, one a row}
        self._calls: dict[str, asyncio.Future[list[Any]]] = {}

    async def result(self, place: int, function: Any, run: Any) -> Any:
        """Return the result for a row. The function is called once for all of them."""
        if function.name not in self._calls:
            calling = self._results(function, run)
            self._calls[function.name] = asyncio.ensure_future(calling)
        # Who waits for a row may be cancelled alone, and the call is that of all rows.
        results = await asyncio.shield(self._calls[function.name])
        return results[place]

    async def _results(self, function: Any, run: Any) -> list[Any]:
        """Call the function of a group, and return a result for each row."""
        if not self.is_whole:
            raise ValueError(
                f"{KEY}.{function.name}.group=True: the sample came without its group, which only "
                "the workers of verl's AgentLoopManagerTQ send. Leave out agent_loop_manager_class"
            )
        rows = [await each for each in self.rows]
        # The samples of a group share their prompt and its ground truth, and differ in the rest.
        group = dict(rows[0])
        group.pop(OF_RESPONSE)
        for name, plural in PLURAL.items():
            del group[name]
            group[plural] = [row[name] for row in rows]
        results = await run(function, function.call(group))
        if not isinstance(results, list) or len(results) != len(rows):
            raise ValueError(
                f"it returned {results!r:.99} for a group of {len(rows)}; "
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
        # {number: (time, label)} of the samples whose scorer runs, the oldest first.
        self._started: dict[int, tuple[float, str]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # The number of the sample of the last line, and how many seconds its next line waits for.
        self._told_number = -1
        self._next_seconds = FIRST_SECONDS

    @contextmanager
    def of(self, label: str, now: float | None = None) -> Iterator[None]:
        """Watch the sample `label` while the block scores it."""
        with self._lock:
            if now is None:
                now = time.monotonic()
            number = next(self._numbers)
            self._started[number] = (now, label)
            if self._thread is None:
                # A daemon does not hold up the end of the process.
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
        # Only the oldest sample is named: one line for each of thousands would hide the cause.
        due = FIRST_SECONDS
        if number == self._told_number:
            due = self._next_seconds
        seconds = now - start
        if seconds < due:
            return None
        self._told_number = number
        self._next_seconds = 2 * seconds
        return (
            f"a scorer still runs after {seconds:.0f} s: {label}; it also runs for {others} other "
            "samples in this process. Training waits for all of them: give the reward function a "
            "time limit if it may not end"
        )

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_SECONDS)
            line = self.overdue(time.monotonic())
            if line is not None:
                logger.warning("verl-gdpo: %s", line)
