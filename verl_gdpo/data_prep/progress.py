"""Progress of long work, on stderr, so that stdout holds the report alone."""

import sys
import time

SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """A line every few seconds; none for work that is done before the first is due."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self.what, self.unit = what, unit
        self.of_total = "" if total is None else f" of {total:,}"
        self.next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES

    def at(self, done: int) -> None:
        """Tell how much is done; call it as often as is convenient."""
        now = time.monotonic()
        if now >= self.next_line_at:
            self.next_line_at = now + SECONDS_BETWEEN_LINES
            print(f"{self.what}: {done:,}{self.of_total} {self.unit}", file=sys.stderr, flush=True)
