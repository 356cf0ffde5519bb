"""Intervals of shares: of questions with a right answer, of differences, and of means of these.

A bootstrap of eight wrong answers draws eight wrong answers each time, and so claims to be certain.
Wilson's interval is right for few questions too (E. B. Wilson, 1927). Newcombe combines such
intervals to one of a paired difference (R. G. Newcombe, 1998, "Improved confidence intervals for
the difference between binomial proportions based on paired data", method 10), and Zou and Donner to
one of a weighted sum of independent shares (2008, MOVER).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# This is the 97.5 % point of the normal law.
Z = 1.959963984540054
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(right: int, count: int) -> Estimate:
    """Return the share of `right` among `count` questions, at least one.

    >>> wilson(0, 8)
    Estimate(value=0.0, low=0.0, high=0.3244...)
    """
    share = right / count
    middle = right + Z**2 / 2
    half = Z * math.sqrt(count * share * (1 - share) + Z**2 / 4)
    low = (middle - half) / (count + Z**2)
    high = (middle + half) / (count + Z**2)
    # Where all are wrong or right, rounding would leave its last bits at this end.
    if right == 0:
        low = 0.0
    if right == count:
        high = 1.0
    return Estimate(share, low, high)


def paired_difference(first: Floats, second: Floats) -> Estimate:
    """Return the share of `second` less that of `first`.

    Args:
        first, second: 0 or 1 for each question, in the same order.
    """
    count = len(first)
    one = wilson(round(first.sum()), count)
    other = wilson(round(second.sum()), count)
    correlation = _correlation(first, second)
    difference = other.value - one.value
    below = _width(other.value - other.low, one.high - one.value, correlation)
    above = _width(other.high - other.value, one.value - one.low, correlation)
    return Estimate(difference, difference - below, difference + above)


def _width(one: float, other: float, correlation: float) -> float:
    return math.sqrt(max(0.0, one**2 - 2 * correlation * one * other + other**2))


def _correlation(first: Floats, second: Floats) -> float:
    """Return Newcombe's phi, with a positive numerator corrected; 0 where it is undefined."""
    both = float((first * second).sum())
    neither = float(((1 - first) * (1 - second)).sum())
    only_first = float(first.sum()) - both
    only_second = float(second.sum()) - both
    margins = (
        (both + only_first)
        * (only_second + neither)
        * (both + only_second)
        * (only_first + neither)
    )
    if margins == 0:
        return 0.0
    numerator = both * neither - only_first * only_second
    if numerator > 0:
        numerator = max(0.0, numerator - len(first) / 2)
    return numerator / math.sqrt(margins)


def weighted_sum(estimates: Sequence[Estimate], weights: Sequence[float]) -> Estimate:
    """Return the sum of independent estimates times their weights, which are not negative."""
    value = 0.0
    below = 0.0
    above = 0.0
    for estimate, weight in zip(estimates, weights, strict=True):
        value += weight * estimate.value
        below += (weight * (estimate.value - estimate.low)) ** 2
        above += (weight * (estimate.high - estimate.value)) ** 2
    return Estimate(value, value - math.sqrt(below), value + math.sqrt(above))
