"""Differences between arms: draws are the unit, and intervals hold for all settings at once."""

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import stats

from workshop.experiments.map.draws import DRAWS, trained_as
from workshop.experiments.map.results import OPTIMIZERS, Key, Outcomes
from workshop.experiments.map.settings import SETTINGS

MATTERS = 0.02  # a smaller difference counts as none
LEVEL = 0.95
MORE, LESS = ("more", "a little more"), ("less", "a little less")
VERDICTS = (*MORE, "no difference", "open", *reversed(LESS))


def largest_t(draws: int, settings: int = len(SETTINGS)) -> float:
    """What the largest |t| of so many settings exceeds in 5 % of the cases, if nothing differs.

    Settings have random numbers of their own, so their t are independent.
    """
    one = LEVEL ** (1 / settings)
    return float(stats.t.ppf((1 + one) / 2, draws - 1))


@dataclass(frozen=True)
class Gain:
    """GDPO, or another arm, minus a rival in one setting: one difference a draw."""

    of_draw: tuple[float, ...]

    @property
    def mean(self) -> float:
        return fmean(self.of_draw) if self.of_draw else math.nan

    @property
    def half_width(self) -> float:
        """Of the interval that holds for all settings at once, for one pair of arms."""
        if len(self.of_draw) < 2:
            return math.inf
        draws = len(self.of_draw)
        return largest_t(draws) * stdev(self.of_draw) / math.sqrt(draws)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def verdict(self) -> str:
        """In words; "not complete" claims nothing."""
        if len(self.of_draw) < DRAWS:
            return "not complete"
        if not any(self.of_draw):
            return "no difference"  # one training
        for sign, words in ((1, MORE), (-1, LESS)):
            if min(sign * self.low, sign * self.high) > 0:
                return words[0] if sign * self.mean >= MATTERS else words[1]
        return "no difference" if max(-self.low, self.high) < MATTERS else "open"


def gain(
    found: Outcomes,
    optimizer: str,
    setting: str,
    over: str = "grpo",
    arm: str = "gdpo",
    field: str = "shares",
) -> Gain:
    """`arm` minus `over`, in the draws that both have; `field` is one of an outcome."""
    one, other = (
        found.get(Key(optimizer, setting, trained_as(SETTINGS[setting], name)), {})
        for name in (arm, over)
    )
    both = sorted({*one} & {*other})
    return Gain(tuple(getattr(one[d], field) - getattr(other[d], field) for d in both))


def joint(found: Outcomes, setting: str, over: str = "grpo", arm: str = "gdpo") -> str:
    """The verdict of both optimisers, the weaker of two; where they disagree, it is open."""
    one, other = (gain(found, name, setting, over, arm).verdict for name in OPTIMIZERS)
    if "not complete" in (one, other):
        return "not complete"
    for words in (MORE, LESS):
        if one in words and other in words:
            return words[max(words.index(one), words.index(other))]
    return one if one == other else "open"
