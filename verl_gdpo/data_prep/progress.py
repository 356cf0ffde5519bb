"""Prints the progress of long work on stderr, because stdout is for the report."""

import sys
import time

SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """Prints a line every few seconds, and nothing for short work."""

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
