"""Makes the parquet files that verl trains on. The command is in `tools/data.py`.

`schema.py` says what a row is. A task with its own source of rows has a file here.
"""

import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from verl_gdpo.terminal import note

SECONDS_BETWEEN_LINES = 2.0
T = TypeVar("T")


class DataError(Exception):
    """An error that the user can correct. The message names what, where, got and expected."""


class UsageError(DataError):
    """The user combined options that exclude each other."""


class LeftOut(Exception):
    """A row, or a test of one, is left out. The message says why, for the report."""


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items; print a line on stderr every few seconds, and nothing for short work.

    Lines become rarer: the next one comes when a quarter more of the time has passed.

    Args:
        items: of the work, in their order.
        what: the work, such as "reading a.json".
        total: how many items there are, where `len(items)` cannot say it.
    """
    if total is None and isinstance(items, Sized):
        total = len(items)
    start = time.monotonic()
    next_line_at = start + SECONDS_BETWEEN_LINES
    for done, item in enumerate(items):
        now = time.monotonic()
        if now >= next_line_at:
            note(f"{what}: {_how_far(done, total, now - start)}")
            next_line_at = now + max(SECONDS_BETWEEN_LINES, (now - start) / 4)
        yield item


def _how_far(done: int, total: int | None, seconds: float) -> str:
    """Return such as "30 of 90 rows, about 20 s left"."""
    if total is None:
        return f"{done:,} rows"
    text = f"{done:,} of {total:,} rows"
    if done == 0:
        return text
    left = seconds / done * (total - done)
    if left < 100:
        return f"{text}, about {left:.0f} s left"
    return f"{text}, about {left / 60:.0f} min left"
