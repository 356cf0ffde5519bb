"""Says whether a run makes progress: a clock for the trainer, and a file for its launcher.

The trainer's process counts the time in a `Clock`, and writes RUN/heartbeat.json every few seconds.
The launcher reads it: a process that does not write can hang as a whole, and not notice.
"""

import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "heartbeat.json"
MINUTES = 10.0  # if `trainer.hang_minutes` does not say another floor
START_FACTOR = 3  # the start may take this many times as long
# and the first phase of each name: an update of long answers on few GPUs takes more than an hour
FIRST_FACTOR = 12
LONGEST_FACTOR = 5  # a phase may take this many times the longest so far
START, BETWEEN = "start", "between steps"


@dataclass(eq=False)
class _Phase:
    name: str
    seconds: float = 0.0  # without phases inside it


class Clock:
    """Tells when a phase of a run has taken too long since something was last finished.

    A phase ends, another one begins, or a sample is finished: each of these is progress. The time
    since then has a limit: `LONGEST_FACTOR` times the longest phase of this name, and at least the
    floor; `FIRST_FACTOR` times the floor if there was none, and between phases; `START_FACTOR`
    times in the start. A phase inside another one is not part of its time.

    Time passes in `tick` alone, so that a machine or a run that stands still for a while, and then
    goes on, is not taken for one that hangs.

    Args:
        floor: seconds.
        base: what goes on outside of all phases, until the first one.
    """

    def __init__(self, floor: float, base: str = START) -> None:
        self.floor = floor
        self._now = self._credited = self._progress = 0.0
        self._phases = [_Phase(base)]  # from the outermost one
        self._longest: dict[str, float] = {}

    def tick(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block is a phase of the run."""
        self._credit()
        self._phases[0].name = BETWEEN
        phase = _Phase(name)
        self._phases.append(phase)
        try:
            yield
        finally:
            self._credit()
            self._phases.remove(phase)  # not the last one: coroutines have phases that overlap
            self._longest[name] = max(phase.seconds, self._longest.get(name, 0.0))

    def _credit(self) -> None:
        self._phases[-1].seconds += self._now - self._credited
        self._credited = self._progress = self._now

    def progress(self) -> None:
        """Note that a sample was finished."""
        self._progress = self._now

    @property
    def current(self) -> str:
        """The innermost phase."""
        return self._phases[-1].name

    @property
    def seconds(self) -> float:
        """The time since the last progress."""
        return self._now - self._progress

    @property
    def limit(self) -> float:
        """How long this time may become in the current phase."""
        longest = self._longest.get(self.current)
        if longest is None:
            return (START_FACTOR if self.current == START else FIRST_FACTOR) * self.floor
        return max(self.floor, LONGEST_FACTOR * longest)

    @property
    def is_overdue(self) -> bool:
        return self.seconds > self.limit


@dataclass(frozen=True)
class Heartbeat:
    """What the file says.

    process: id of the process that writes it.
    step: None before the first one.
    samples: finished in this start.
    limit: seconds after which a file that is not written again shows a process that hangs.
    machine: on which the process runs; on a cluster it may be another one than the launcher's.
    """

    process: int
    phase: str
    step: int | None
    samples: int
    limit: float
    machine: str = field(default_factory=platform.node)

    def write(self, run: Path) -> None:
        """Write the file, or at least its time, which a full disk allows."""
        file, text = run / FILE, json.dumps(asdict(self))
        with suppress(OSError):
            if file.exists() and file.read_text() == text:
                os.utime(file)
            else:
                file.write_text(text)

    @classmethod
    def read(cls, run: Path) -> "Heartbeat | None":
        """Return what was written last; None if nothing was, or it is being written."""
        try:
            return cls(**json.loads((run / FILE).read_text()))
        except (OSError, ValueError, TypeError):
            return None


class Pulse:
    """Looks at the heartbeat of a run, as its launcher does, again and again."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._written: int | None = None
        self._silent = 0.0
        self._last = time.monotonic()

    def look(self, most: float) -> Heartbeat | None:
        """Return the heartbeat if its writer has been silent for too long.

        Args:
            most: seconds that count at most of the time since the last look, in which this process
                may have been stopped.
        """
        now = time.monotonic()
        self._silent += min(now - self._last, most)
        self._last = now
        try:
            written = os.stat(self._run / FILE).st_mtime_ns
        except OSError:  # it is not there, or its disk is away for a moment
            written = None
        if written is None or written != self._written:
            self._written, self._silent = written, 0.0
            return None
        heartbeat = Heartbeat.read(self._run)
        return heartbeat if heartbeat and self._silent > heartbeat.limit else None


def remove(run: Path) -> None:
    """Remove the file: from now on, nobody writes it."""
    with suppress(OSError):
        (run / FILE).unlink()
