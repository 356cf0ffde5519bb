"""Makes the parquet files that verl trains on. The command is in `tools/data.py`.

`schema.py` says what a row is. A task with its own source of rows has a file here.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

SECONDS_BETWEEN_LINES = 2.0
T = TypeVar("T")


class DataError(Exception):
    """An error that the user can correct. The message names what, where, got and expected."""


class UsageError(DataError):
    """The user combined options that exclude each other."""


class LeftOut(Exception):
    """A row, or a test of one, is left out. The message says why, for the report."""


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield the items; print a line on stderr every few seconds, and nothing for short work."""
    of_total = f" of {len(items):,}" if isinstance(items, Sized) else ""
    next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
    for done, item in enumerate(items):
        if time.monotonic() >= next_line_at:
            print(f"{what}: {done:,}{of_total} rows", file=sys.stderr, flush=True)
            next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
        yield item
