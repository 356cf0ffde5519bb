"""How often the intervals of the advice hold the truth: the table of RESULTS.md.

A population has the rewards of many groups. A dump has few groups of it, drawn at random, and the
truth is the share in all of them. Nothing about the interval was chosen on the held-out structures.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.zero import Floats
from verl_gdpo.tools.advice import GDPO, Evidence, Update

GROUPS, SAMPLES, DUMPS = 20_000, 8, 2_000  # of a population, of a group, of a structure
SIZES = ((2, 4), (3, 8), (10, 8), (30, 16))  # steps and groups of a step
ESTIMATORS = ("GRPO", "GRPO by range", "GDPO")

Structure = Callable[[Floats, Floats, Floats], list[Any]]
# of uniform numbers: two a sample, and one a group, which is how easy its prompt is
TUNING: dict[str, Structure] = {
    "two, met in 30 % and 50 %": lambda x, y, p: [x < 0.3, y < 0.5],
    "the same, ranges 1 and 6": lambda x, y, p: [x < 0.3, 6 * (y < 0.5)],
    "rare, 2 %": lambda x, y, p: [x < 0.02, y < 0.5],
    "graded, and by prompt": lambda x, y, p: [np.floor(5 * x) / 4, y < p],
    "a small length cost": lambda x, y, p: [x < p, (y - (x < p) / 2).clip(0) / 20],
    "against each other": lambda x, y, p: [x < p, (y < np.where(x < p, 0.1, 0.9)) / 2],
    "one in ten prompts can be solved": lambda x, y, p: [(x < 0.5) & (p < 0.1), (y < 0.5) / 2],
    "a bonus that spoils the answer": lambda x, y, p: [x < 0.5, (y < 0.6 - 0.3 * (x < 0.5)) / 20],
}
HELD_OUT: dict[str, Structure] = {
    "four, ranges 1 to 5": lambda x, y, p: [x < 0.9, 2 * (y < 0.7), 3 * (x < 0.5), 5 * (x > 0.9)],
    "rare, 3 %, costs the other": lambda x, y, p: [x < 0.03, (y < 0.6) & (x > 0.1)],
    "length grows with skill": lambda x, y, p: [y < p, -x * p / 10],
    "short, if correct": lambda x, y, p: [x < p, (x < p) & (y < 0.5)],
    "ranges 100 and 1": lambda x, y, p: [100 * (x < p), y < 0.4],
    "prompts solved or not": lambda x, y, p: [x < np.where(p < 0.5, 0.02, 0.98), y < 0.5],
    "a skewed size": lambda x, y, p: [x**8, y < 0.5],
    "three alike, and one": lambda x, y, p: [x < 0.45, x < 0.5, x < 0.55, y < 0.5],
}


def rows() -> Iterator[tuple[str, str]]:
    """(structures and size of a dump, the cells of its line)."""
    for kind, structures in (("tuning", TUNING), ("held out", HELD_OUT)):
        populations = {name: population(structure) for name, structure in structures.items()}
        for steps, groups in SIZES:
            covered = [
                (rate, f"{name}, {estimator}")
                for name, updates in populations.items()
                for estimator, update in zip(ESTIMATORS, updates, strict=True)
                for rate in coverage(update, steps * groups)
            ]
            mean = np.mean([rate for rate, _ in covered])
            lowest, where = min(covered)
            yield f"{kind} | {steps} x {groups}", f"{mean:.3f} | {lowest:.3f} | {where}"


def population(structure: Structure) -> list[Update]:
    chance = np.random.default_rng(0)
    x, y = chance.random((2, GROUPS, SAMPLES))
    values = np.stack(structure(x, y, chance.random((GROUPS, 1))), axis=-1).astype(float)
    values_BK = values.reshape(GROUPS * SAMPLES, -1)
    weights = dict.fromkeys(map(str, range(values_BK.shape[1])), 1.0)
    rewards = RewardMatrix(weights, values_BK, np.ones(values_BK.shape, bool))
    counted_B, groups = np.ones(len(values_BK), bool), np.repeat(np.arange(GROUPS), SAMPLES)
    return Evidence([(rewards, counted_B, groups)], GDPO).updates


def coverage(update: Update, groups: int) -> list[float]:
    """Of the dumps for which there is an interval, the share that holds the truth; by reward."""
    drawn = np.random.default_rng(1).integers(GROUPS, size=(DUMPS, groups))
    dumps = (Update(update.products_GK[of], update.squares_G[of]) for of in drawn)
    intervals = [dump.interval_2K for dump in dumps]
    low_DK, high_DK = np.stack([each for each in intervals if each is not None], axis=1)
    rates: list[float] = ((low_DK <= update.share_K) & (update.share_K <= high_DK)).mean(0).tolist()
    return rates
