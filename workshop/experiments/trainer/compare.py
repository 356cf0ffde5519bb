"""Differences between arms: paired by seed, with the intervals that the protocol names."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from scipy import stats

from workshop.experiments.trainer.results import Result
from workshop.experiments.trainer.settings import PROTOCOL, SETTINGS, Run, Setting

# the seven of the protocol: setting, arm, the arm that is subtracted
COMPARISONS = (
    *((setting, "gdpo", "grpo") for setting in PROTOCOL),
    *((s, "gdpo", "grpo_rescaled") for s in PROTOCOL if "grpo_rescaled" in SETTINGS[s].arms),
)
LEVEL = 1 - 0.05 / len(COMPARISONS)
MATTERS = 0.05  # an interval within this, on both sides of 0, is no difference that matters
POWER = 0.8

Results = Mapping[Run, Result]
Endpoint = Callable[[Result, Setting], float]
Verdict = Literal[
    "difference",
    "difference, but none that matters",
    "no difference that matters",
    "open",
    "not complete",
]


def small(result: Result, setting: Setting) -> float:
    """The primary endpoint: the share of the small reward, mean over the training."""
    return fmean(result.small)


def large(result: Result, setting: Setting) -> float:
    """The share of the large reward."""
    return fmean(result.large)


def both(result: Result, setting: Setting) -> float:
    """The mean share of both rewards."""
    return (fmean(result.small) + fmean(result.large)) / 2


def declared(result: Result, setting: Setting) -> float:
    """The share of the score that was declared: the sum of the rewards, each with its range.

    NaN where ranges depend on the prompt, because the shares of single prompts were not kept.
    """
    if setting.own_format:
        return math.nan
    least, most = min(setting.ranges.values()), max(setting.ranges.values())
    return (least * fmean(result.small) + most * fmean(result.large)) / (least + most)


ENDPOINTS: Mapping[str, Endpoint] = {
    "small reward": small,
    "large reward": large,
    "mean of both": both,
    "declared score": declared,
}


@dataclass(frozen=True)
class Difference:
    """Of two arms, from the seeds that both have; with fewer than two there is no interval."""

    of_seed: Mapping[int, float]
    seeds: Sequence[int]  # of the protocol
    level: float

    @property
    def mean(self) -> float:
        return fmean(self.of_seed.values()) if self.of_seed else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation of the paired differences between seeds."""
        return stdev(self.of_seed.values()) if len(self.of_seed) > 1 else math.nan

    @property
    def half_width(self) -> float:
        count = len(self.of_seed)
        if count < 2:
            return math.nan
        return float(stats.t.ppf((1 + self.level) / 2, count - 1)) * self.spread / math.sqrt(count)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def verdict(self) -> Verdict:
        """What the protocol calls the interval."""
        if {*self.seeds} - {*self.of_seed}:
            return "not complete"
        is_small = self.low > -MATTERS and self.high < MATTERS
        if self.low > 0 or self.high < 0:
            return "difference, but none that matters" if is_small else "difference"
        return "no difference that matters" if is_small else "open"


def difference(
    found: Results,
    setting: str,
    arm: str,
    other: str,
    endpoint: Endpoint = small,
    level: float = LEVEL,
) -> Difference:
    """`arm` minus `other`, paired by seed."""
    plan, of_seed = SETTINGS[setting], {}
    for seed in plan.seeds:
        one, two = (found.get(Run(setting, name, seed)) for name in (arm, other))
        if one and two:
            more = endpoint(one, plan) - endpoint(two, plan)
            if not math.isnan(more):  # an endpoint that was not kept
                of_seed[seed] = more
    return Difference(of_seed, plan.seeds, level)


def in_order(found: Results) -> list[tuple[str, str, str]]:
    """The comparisons of which there is a seed, setting after setting."""
    rows = sorted(COMPARISONS, key=lambda row: PROTOCOL.index(row[0]))
    return [row for row in rows if difference(found, *row).of_seed]


def seeds_needed(effect: float, spread: float, level: float = 0.95) -> int:
    """Seeds for each arm so that a paired t test finds `effect` with 80 % power.

    The smallest n with n >= ((t(1 - (1 - level) / 2, n - 1) + t(0.8, n - 1)) spread / effect)^2,
    where `spread` is the standard deviation of the paired differences.
    """
    n = 2
    while True:
        quantiles = stats.t.ppf([(1 + level) / 2, POWER], n - 1)
        if n >= (float(quantiles.sum()) * spread / effect) ** 2:
            return n
        n += 1
