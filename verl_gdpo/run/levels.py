"""What is usual for a metric of a run, and whether validation falls.

Each keeps the latest values alone, so that a step costs the same at the end of a long run.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

USUAL = 20  # values that make a usual level
RECENT = 5  # values that make a present level
VALIDATIONS = 100  # the latest, that are remembered of a reward
FEWEST_FALLING = 8  # validations
# standard deviations of a fall, in two validations in a row, while training rises by `RISES`
SURE, RISES = 1.7, 1.0
OF_FEW = 30.0  # over the number of validations: few of them hardly say how noisy they are
OF_MANY, MANY = 0.05, 30  # for each one beyond `MANY`: a trend is sought once more
UNLESS_IT_RISES = 1.0  # more, where training does not rise


class Level:
    """What is usual for one metric."""

    def __init__(self) -> None:
        self.start = math.nan  # median of the first `USUAL` values
        self.near: deque[float] = deque(maxlen=USUAL)  # the latest values that were not broken
        self.window: deque[float] = deque(maxlen=USUAL + RECENT)
        self.best, self.noise = -math.inf, 0.0  # the best mean of `USUAL` values, and their noise
        self.recent = math.nan  # the mean of the `RECENT` values after them
        self.low, self.high = math.inf, -math.inf  # of a single sample
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.window.append(value)
        if len(self.window) == USUAL and math.isnan(self.start):
            self.start = statistics.median(self.window)

    @property
    def usual(self) -> float:
        return statistics.median(self.near) if len(self.near) == USUAL else math.nan

    def add_mean(self, value: float) -> None:
        """Take the mean of a reward at a step."""
        self.add(value)
        self.total, self.count = self.total + value, self.count + 1
        if len(self.window) < USUAL + RECENT:
            return
        values = [*self.window]
        before, self.recent = values[:USUAL], _mean(values[USUAL:])
        if (mean := _mean(before)) > self.best:
            self.best = mean
            self.noise = math.sqrt(_mean([(a - b) * (a - b) for a, b in pairwise(before)]) / 2)


class Validations:
    """The latest validations of a reward, and the mean of training before each."""

    def __init__(self) -> None:
        self.steps: deque[int] = deque(maxlen=VALIDATIONS)
        self.values: deque[float] = deque(maxlen=VALIDATIONS)
        self.trained: deque[float] = deque(maxlen=VALIDATIONS)
        self.until = 0.0, 0  # sum and number of training's values at the last validation

    def add(self, step: int, value: float, training: Level) -> None:
        total, count = training.total - self.until[0], training.count - self.until[1]
        if math.isfinite(value) and count:
            self.until = training.total, training.count
            self.steps.append(step)
            self.values.append(value)
            self.trained.append(total / count)

    def fall(self) -> tuple[int, float]:
        """Return (where the clearest fall begins that lasts until now, how sure it is).

        Both are of the trend of the values from there on, in standard deviations of its chance.
        """
        fewest = max(FEWEST_FALLING, len(self.values) // 3)
        falls = [(-rise, begin) for begin, rise in trends([*self.values], fewest)]
        sure, begin = max(falls, default=(0.0, 0))
        return begin, sure

    def sure_enough(self, rise_of_training: float) -> float:
        """How sure a fall has to be; numbers tuned on made runs, as docs/metrics.md says."""
        count = max(len(self.values), 1)
        of_training = 0.0 if rise_of_training > RISES else UNLESS_IT_RISES
        return SURE + OF_FEW / count + OF_MANY * max(0, count - MANY) + of_training

    def rise_of_training(self, begin: int) -> float:
        tail = [*self.trained][begin:]
        return next((rise for at, rise in trends(tail, len(tail)) if at == 0), 0.0)

    def numbers(self, begin: int) -> dict[str, object]:
        values, trained = [*self.values][begin:], [*self.trained][begin:]
        ends = {
            "best": values[:3],
            "now": values[-3:],
            "before": trained[:3],
            "after": trained[-3:],
        }
        return {
            **{k: _mean(few or [math.nan]) for k, few in ends.items()},
            "since": [*self.steps, 0][begin],
        }


def trends(values: Sequence[float], fewest: int) -> Iterator[tuple[int, float]]:
    """Yield (begin, standard deviations by which the values rise) of each end of the values."""
    bends = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    # second differences, which a trend does not touch
    noise = math.sqrt(sum(bend * bend for bend in bends) / 6 / len(bends)) if bends else 0.0
    total = weighted = 0.0  # of the values from `begin` on; weighted by their index
    for begin in range(len(values) - 1, -1, -1):
        total, weighted = total + values[begin], weighted + begin * values[begin]
        count = len(values) - begin
        if count >= fewest and noise > 0:
            middle = (begin + len(values) - 1) / 2
            yield begin, (weighted - middle * total) / noise / math.sqrt((count**3 - count) / 12)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
