"""Differences between arms: paired by seed, with the intervals that the protocol names."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from scipy import stats

from verl_gdpo.tools.report.page import signed
from workshop.experiments.trainer.results import Result
from workshop.experiments.trainer.settings import PROTOCOL, SECOND, SETTINGS, Run, Setting

# the seven of the protocol: setting, arm, the arm that is subtracted
COMPARISONS = (
    *((setting, "gdpo", "grpo") for setting in PROTOCOL),
    *((s, "gdpo", "grpo_rescaled") for s in PROTOCOL if "grpo_rescaled" in SETTINGS[s].arms),
)
LEVEL = 1 - 0.05 / len(COMPARISONS)
MATTERS = 0.05  # an interval within this, on both sides of 0, is no difference that matters
POWER = 0.8
# the eight of the second protocol, with its limit
COMPARISONS_2 = tuple((s, "gdpo", other) for s in SECOND for other in ("grpo", "grpo_rescaled"))
MATTERS_2 = 0.02

Results = Mapping[Run, Result]
Endpoint = Callable[[Result, Setting], float]
Verdict = Literal[
    "difference",
    "difference, but none that matters",
    "no difference that matters",
    "open",
    "not complete",
]


def share(name: str) -> Endpoint:
    """The share of a reward, mean over the training."""
    return lambda result, setting: fmean(result.shares[name])


def primary(result: Result, setting: Setting) -> float:
    """The share that decides."""
    return fmean(result.shares[setting.primary])


def mean_of_all(result: Result, setting: Setting) -> float:
    """The mean of the shares of all rewards."""
    return fmean(fmean(curve) for curve in result.shares.values())


def declared(result: Result, setting: Setting) -> float:
    """The share of the score that was declared: the sum of the rewards, each with its range.

    NaN where ranges depend on the prompt, because the shares of single prompts were not kept.
    """
    if setting.own_format:
        return math.nan
    earned = sum(size * fmean(result.shares[name]) for name, size in setting.worth.items())
    return earned / sum(setting.worth.values())


ENDPOINTS: Mapping[str, Endpoint] = {
    "small reward": share("small"),
    "large reward": share("large"),
    "mean of both": mean_of_all,
    "declared score": declared,
}


@dataclass(frozen=True)
class Difference:
    """Of two arms, from the seeds that both have; with fewer than two there is no interval."""

    of_seed: Mapping[int, float]
    seeds: Sequence[int]  # of the protocol
    level: float
    matters: float = MATTERS

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
    def p(self) -> float:
        """Of a paired t test; 1 for one that is not complete."""
        if self.verdict == "not complete":
            return 1.0
        if not self.spread:
            return float(self.mean == 0)
        error = self.spread / math.sqrt(len(self.of_seed))
        return float(2 * stats.t.sf(abs(self.mean) / error, len(self.of_seed) - 1))

    def text(self, digits: int = 3) -> str:
        """The mean with its interval, or what can be said of fewer than two seeds."""
        if not self.of_seed:
            return "no seed"
        mean, low, high = (signed(value, digits) for value in (self.mean, self.low, self.high))
        return f"{mean} (1 seed)" if math.isnan(self.half_width) else f"{mean} [{low}, {high}]"

    @property
    def verdict(self) -> Verdict:
        """What the protocol calls the interval."""
        if {*self.seeds} - {*self.of_seed}:
            return "not complete"
        is_small = self.low > -self.matters and self.high < self.matters
        if self.low > 0 or self.high < 0:
            return "difference, but none that matters" if is_small else "difference"
        return "no difference that matters" if is_small else "open"


def difference(
    found: Results,
    setting: str,
    arm: str,
    other: str,
    endpoint: Endpoint = primary,
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


def holm(found: Results) -> dict[tuple[str, str, str], Difference]:
    """The comparisons of the second edition, each at the level at which Holm tests it."""
    gains = {row: difference(found, *row) for row in COMPARISONS_2}
    left = len(gains)
    for row in sorted(gains, key=lambda row: gains[row].p):
        gains[row] = replace(gains[row], level=1 - 0.05 / left, matters=MATTERS_2)
        if gains[row].p < 0.05 / left:
            left -= 1  # of the others, none has a smaller p, so this stops at the first failure
    return gains


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
