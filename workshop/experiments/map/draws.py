"""One draw: every arm of a setting gets a learning rate on some seeds, and is judged on others.

A draw has seeds that no other draw has, for both. So draws differ in all that chance decides, the
learning rate too, and they are what intervals are made of. Shape letters: as in `simulate`.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from workshop.experiments.map.arms import ARMS
from workshop.experiments.map.settings import Setting
from workshop.experiments.map.simulate import Problem, make_problem, train

DRAWS = 8
SEEDS, TUNING_SEEDS, FIRST_TUNING_SEED = 50, 32, 1_000_000
# the rates that are tried differ by a factor of 2; the search begins with three around this one
MIDDLE = {"one scale": 0.16, "adam": 0.32, "sgd": 16.0}
MAX_TRIED = 8


class Outcome(NamedTuple):
    """Of one arm in one draw: means over the training and the seeds."""

    rate: float
    shares: float  # the rewards' shares, by their worth
    small: float  # share of the reward that has the smallest range, for each prompt


def arms_of(setting: Setting) -> list[str]:
    """The arms that differ in a setting, GDPO first.

    Where all rewards have one range, dividing by it changes nothing; nor do a prompt's own ranges
    differ from the reward's, where they do not depend on the prompt.
    """
    same = set()
    if len({reward.bound for reward in setting.rewards}) == 1:
        same.add("grpo_range")
    if all(reward.by_prompt == "no" for reward in setting.rewards):
        same.add("grpo_prompt_range")
    return [arm for arm in ARMS if arm not in same]


def trained_as(setting: Setting, arm: str) -> str:
    """The arm whose training is that of `arm`."""
    if arm in arms_of(setting):
        return arm
    return trained_as(setting, "grpo_range") if arm == "grpo_prompt_range" else "grpo"


def run_draw(
    setting: Setting, optimizer: str, draw: int, arms: Iterable[str]
) -> dict[str, Outcome]:
    """Train arms in one setting, each at the best rate of the draw's own tuning seeds."""
    worth_K = np.array([reward.worth for reward in setting.rewards])
    worth_K = worth_K / worth_K.sum()
    first = FIRST_TUNING_SEED + draw * TUNING_SEEDS
    tuning = make_problem(setting, range(first, first + TUNING_SEEDS))
    problem = make_problem(setting, range(draw * SEEDS, (draw + 1) * SEEDS))
    found = {}
    for arm in arms:
        rate = best_rate(_try_on(tuning, arm, optimizer, worth_K), MIDDLE[optimizer])
        hit_K = train(problem, ARMS[arm], [rate], optimizer).mean((0, 2, 3), dtype=np.float64)
        found[arm] = Outcome(rate, float(worth_K @ hit_K[:-1]), float(hit_K[-1]))
    return found


def _try_on(
    problem: Problem, arm: str, optimizer: str, worth_K: np.ndarray
) -> Callable[[list[float]], list[float]]:
    def outcomes(rates: list[float]) -> list[float]:
        hit_KQ = train(problem, ARMS[arm], rates, optimizer).mean((0, 3), dtype=np.float64)
        return [float(outcome) for outcome in worth_K @ hit_KQ[:-1]]

    return outcomes


def best_rate(outcomes: Callable[[list[float]], list[float]], middle: float) -> float:
    """The top of the parabola through the best rate and its neighbours, half and twice of it.

    Climbs from `middle` until both neighbours of the best rate are worse; at most 8 are tried.
    """
    tried: dict[int, float] = {}

    def add(*steps: int) -> None:
        tried.update(zip(steps, outcomes([middle * 2**step for step in steps]), strict=True))

    add(-1, 0, 1)
    best = max(tried, key=tried.__getitem__)
    while best in (min(tried), max(tried)) and len(tried) < MAX_TRIED:
        add(best - 1 if best == min(tried) else best + 1)
        best = max(tried, key=tried.__getitem__)
    if best in (min(tried), max(tried)):
        return middle * 2.0**best
    low, top, high = (tried[best + step] for step in (-1, 0, 1))
    return float(middle * 2 ** (best + 0.5 * (high - low) / (2 * top - low - high)))
