"""Differences between two arms, one a seed or a draw, with Student's interval of their mean."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import stats


@dataclass(frozen=True)
class Difference:
    """Of two arms, paired by seed or draw, of which there are two or more."""

    values: tuple[float, ...]
    level: float = 0.95

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def spread(self) -> float:
        """Standard deviation of the differences."""
        return stdev(self.values)

    @property
    def half_width(self) -> float:
        count = len(self.values)
        critical = float(stats.t.ppf((1 + self.level) / 2, count - 1))
        return critical * self.spread / math.sqrt(count)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def p(self) -> float:
        """Of a paired t test."""
        if not self.spread:
            return float(not self.mean)
        t = abs(self.mean) / (self.spread / math.sqrt(len(self.values)))
        return float(2 * stats.t.sf(t, len(self.values) - 1))

    def text(self, digits: int = 3) -> str:
        mean, low, high = (signed(value, digits) for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]"


def signed(value: float, digits: int = 3) -> str:
    """`+0.870`, and what is shown as 0 without a sign."""
    rounded = round(value, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"
