"""Says from outside when a run has logged no step for too long: the launcher asks it.

    trainer:
      hang_minutes: 30    # the floor of the limit; 0 switches this off

Relies on verl 0.9: `FileLogger` writes each line at once; a step is logged after its validation and
its checkpoint, with `timing_s/NAME` of each part; names of validation metrics begin with "val-".
"""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl_gdpo.run.folder import MetricsReader

KEY, MINUTES = "trainer.hang_minutes", 30.0
FIRST_SECONDS = 7200.0  # an update of long answers on few GPUs takes more than an hour
LONGEST_FACTOR = 5  # a step may take this many times the longest so far
STEP, VALIDATION = "timing_s/step", "timing_s/testing"
# {metric of a step that does more than others: the key that says whether a run has such steps}
PARTS = {
    "timing_s/update_actor": "",  # all have
    VALIDATION: "trainer.test_freq",
    "timing_s/save_checkpoint": "trainer.save_freq",
}


def hang_seconds(configuration: Mapping[str, Any]) -> float:
    """Return the floor of the limit; 0 if the watch is off, or verl writes no metrics file.

    Args:
        configuration: `flat`.

    Raises:
        ValueError: `trainer.hang_minutes` is something else than a number of minutes.
    """
    floor = floor_seconds(_setting(configuration, KEY, MINUTES))
    logger = configuration.get("trainer.logger", ())
    return floor if "file" in ([logger] if isinstance(logger, str) else logger) else 0.0


def floor_seconds(minutes: Any) -> float:
    """Return a value of `trainer.hang_minutes` in seconds.

    Raises:
        ValueError: it is something else than a number of minutes.
    """
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes >= 0:
        raise ValueError(f"{KEY}={minutes!r}: expected minutes, such as 30, or 0 for no limit")
    return 60.0 * minutes


def _setting(configuration: Mapping[str, Any], key: str, default: float) -> Any:
    """A key's value; the default if the environment of the run has the value."""
    value = configuration.get(key, default)
    return default if isinstance(value, str) and value.startswith("${") else value


class HangWatch:
    """Counts how long the metrics file of a run has had no new line.

    The limit is `LONGEST_FACTOR` times the longest step so far, and at least the floor. It is at
    least `FIRST_SECONDS` until a step of this start has had each of `PARTS` that the run has.

    Args:
        metrics: the file.
        configuration: the run's, `flat`.
        clock: seconds. It stands still while the machine is suspended.
    """

    def __init__(
        self,
        metrics: Path,
        configuration: Mapping[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.floor = hang_seconds(configuration)
        self.silence = 0.0
        self._lines, self._clock, self._last = MetricsReader(metrics), clock, clock()
        self._longest: float | None = None
        # another frequency than 0 and -1, also one that only the run's environment knows
        self._missing = {
            part
            for part, key in PARTS.items()
            if not key or _setting(configuration, key, 1 if key in configuration else -1) > 0
        }

    @property
    def limit(self) -> float:
        """How long the silence may become."""
        first = FIRST_SECONDS if self._missing else 0.0
        return max(self.floor, first, LONGEST_FACTOR * (self._longest or 0.0))

    def problem(self) -> str:
        return (
            f"no step was logged for {self.silence:.0f} s, and {self.limit:.0f} s were allowed: "
            f"{LONGEST_FACTOR} times the longest step so far, and at least {KEY}, or two hours as "
            "long as a first update, validation or checkpoint is to come"
        )

    def is_overdue(self, most: float) -> bool:
        """Read new lines, and return whether the silence is longer than the limit.

        Args:
            most: seconds that count at most of the time since the last call, in which this process
                may have been stopped.
        """
        now = self._clock()
        self.silence += min(now - self._last, most)
        self._last = now
        try:
            for _, metrics in self._lines.new():
                self._add(metrics)
        except OSError:  # its disk is away for a moment
            self.silence = 0.0
        return bool(self.floor) and self.silence > self.limit

    def _add(self, metrics: Mapping[str, float]) -> None:
        is_validation = all(name.startswith("val-") for name in metrics)
        seconds = self.silence
        if self._longest is None and not is_validation:  # the start of verl is no part of a step
            of_step = metrics.get(STEP, math.nan)
            seconds = of_step if math.isfinite(of_step) else seconds
        self._longest, self.silence = max(seconds, self._longest or 0.0), 0.0
        self._missing -= {VALIDATION} if is_validation else {*metrics}
