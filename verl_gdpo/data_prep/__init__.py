"""Makes the parquet files that verl trains on. The command is in `tools/data.py`.

`schema.py` says what a row is. A task with its own source of rows has a file here.
"""

import sys
import time

SECONDS_BETWEEN_LINES = 2.0


class DataError(Exception):
    """An error that the user can correct. The message names what, where, got and expected."""


class UsageError(DataError):
    """The user combined options that exclude each other."""


class LeftOut(Exception):
    """A row, or a test of one, is left out. The message says why, for the report."""


class Progress:
    """Prints a line on stderr every few seconds, and nothing for short work."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.unit = what, unit
        self.of_total = "" if total is None else f" of {total:,}"
        self.next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES

    def at(self, done: int) -> None:
        """Report how much is done. It may be called as often as you like."""
        now = time.monotonic()
        if now >= self.next_line_at:
            self.next_line_at = now + SECONDS_BETWEEN_LINES
            print(f"{self.what}: {done:,}{self.of_total} {self.unit}", file=sys.stderr, flush=True)
