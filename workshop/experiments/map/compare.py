"""What the arms of a setting achieve, each at a learning rate chosen on other seeds.

Shape letters: as in `simulate`; N resamples of the bootstrap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workshop.experiments.map.arms import ARMS
from workshop.experiments.map.settings import Setting
from workshop.experiments.map.simulate import make_problem, train

# neighbours differ by a factor of 2; the best rate is looked for between them too
RATES = {
    "one scale": [0.04 * 2**i for i in range(8)],
    "adam": [0.04 * 2**i for i in range(6)],
    "sgd": [1.0 * 2**i for i in range(7)],
}
TUNING_SEEDS, FIRST_TUNING_SEED = 32, 1_000_000
RESAMPLES = 50_000


class Interval(NamedTuple):
    """A mean difference with its 95 % interval, and one that holds for all settings at once."""

    mean: float
    low: float
    high: float
    low_all: float
    high_all: float


@dataclass(frozen=True)
class Outcome:
    """Of one arm in one setting. The outcome is the mean of the rewards' shares, by their worth."""

    rate: float
    is_edge: bool  # the best rate that was tried is the lowest or the highest
    outcome_S: np.ndarray  # mean over training
    final_S: np.ndarray  # of the trained policy
    hit_TK: np.ndarray  # share of each reward before each step, mean over the seeds


def outcomes(
    setting: Setting, seeds: Sequence[int], arms: Iterable[str] = tuple(ARMS)
) -> dict[str, Outcome]:
    """Train every arm: on seeds of their own to choose its learning rate, then on `seeds`."""
    rates = RATES[setting.optimizer]
    worth_K = np.array([reward.worth for reward in setting.rewards])
    worth_K = worth_K / worth_K.sum()
    tuning = make_problem(setting, range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + TUNING_SEEDS))
    problem = make_problem(setting, seeds)
    result = {}
    for arm in arms:
        tried_Q = np.tensordot(worth_K, train(tuning, ARMS[arm], rates), (0, 1)).mean((0, 2))
        rate, is_edge = best_rate(rates, tried_Q)
        hit_TKS = train(problem, ARMS[arm], [rate])[:, :, 0]
        outcome_TS = np.tensordot(worth_K, hit_TKS, (0, 1))
        result[arm] = Outcome(
            rate, is_edge, outcome_TS.mean(0), outcome_TS[-1], hit_TKS.mean(2, dtype=np.float64)
        )
    return result


def best_rate(rates: Sequence[float], outcome_Q: np.ndarray) -> tuple[float, bool]:
    """The top of the parabola through the best rate and its neighbours, and whether it has none."""
    best = int(outcome_Q.argmax())
    if best in (0, len(rates) - 1):
        return rates[best], True
    low, top, high = outcome_Q[best - 1 : best + 2]
    shift = 0.5 * (high - low) / (2 * top - low - high)
    return float(rates[best] * (rates[best] / rates[best - 1]) ** shift), False


class Bootstrap:
    """Intervals for differences between arms that were trained on the same seeds."""

    def __init__(self, seeds: int) -> None:
        chance = np.random.default_rng(0)
        drawn = chance.integers(seeds, size=(RESAMPLES, seeds), dtype=np.int32)
        drawn += seeds * np.arange(RESAMPLES, dtype=np.int32)[:, None]
        counts = np.bincount(drawn.ravel(), minlength=RESAMPLES * seeds)
        self.share_NS = counts.reshape(RESAMPLES, seeds).astype(np.float32) / np.float32(seeds)

    def interval(self, difference_S: np.ndarray, settings: int) -> Interval:
        mean_N = self.share_NS @ difference_S.astype(np.float32)
        tails = [0.025, 0.975, 0.025 / settings, 1 - 0.025 / settings]
        return Interval(float(difference_S.mean()), *np.quantile(mean_N, tails).tolist())
