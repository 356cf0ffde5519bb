"""Logs the sample on which a scorer hangs, because training would wait for it silently."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

logger = logging.getLogger(__name__)

FIRST_SECONDS = 60.0  # time until the first line about a sample; each next line waits twice as long
POLL_SECONDS = 1.0


class SlowScoring:
    """Watches the samples whose scorer runs in this process, from the moment when it starts.

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
