"""The demonstration's results: what each setting, arm and seed earned in each step."""

import math
from functools import cache
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq

from workshop.experiments.differences import Difference
from workshop.experiments.trainer.compare import at_holms_levels

FILE = Path(__file__).with_name("demonstration.parquet")
LAST = 5  # steps of the primary endpoint
ARMS_OF_HARMS = ("grpo", "gdpo", "gdpo_kept")
# {setting: bounds that protocol_2.md expects of the answer, minus GRPO, of GDPO and of gdpo_kept}
HARMS = {
    "bonus": ((-math.inf, -0.4), (-0.05, 0.05)),
    "length": ((-math.inf, -0.1), (-0.05, math.inf)),
    "noise": ((-math.inf, -0.1), (-0.05, 0.05)),
}
# {step: bounds that protocol.md expects of GRPO's format, as a mean of five steps}
LONGER = {60: (0.15, 0.5), 150: (0.5, 1.0)}
# {(setting, reward): its highest value, by which its means are divided}
HIGHEST = {("model", "words"): 10}
# {rival: {reward: bounds that protocol_3.md expects of GDPO minus the rival, in each seed}}
MODEL = {
    "grpo": {"keyword": (0.2, math.inf), "words": (-0.15, 0.15), "ending": (-0.15, 0.15)},
    "grpo_divided": dict.fromkeys(("keyword", "words", "ending"), (-0.2, 0.2)),
}


@cache
def curves() -> dict[tuple[str, str, str], dict[int, list[float]]]:
    """Return {(setting, arm, reward): {seed: the mean of each step}}, with the seeds in order."""
    means: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in sorted(pq.read_table(FILE).to_pylist(), key=lambda row: (row["seed"], row["step"])):
        setting, arm, reward = row["setting"], row["arm"], row["reward"]
        of_seed = means.setdefault((setting, arm, reward), {}).setdefault(row["seed"], [])
        of_seed.append(row["mean"] / HIGHEST.get((setting, reward), 1))
    return means


def ends(setting: str, arm: str, reward: str, last: int = LAST) -> dict[int, float]:
    """Return {seed: the mean over the last steps, or with 0 over all}."""
    return {s: fmean(means[-last:]) for s, means in curves()[setting, arm, reward].items()}


def mean(setting: str, arm: str, reward: str) -> float:
    return fmean(ends(setting, arm, reward).values())


def longer() -> dict[int, list[float]]:
    """Return {step: the mean of the five steps until it, of each seed of the longer GRPO}."""
    seeds = curves()["long", "grpo", "format"].values()
    return {step: [fmean(means[step - LAST : step]) for means in seeds] for step in LONGER}


def seeds_of_harms() -> int:
    [number] = {len(ends(setting, arm, "answer")) for setting in HARMS for arm in ARMS_OF_HARMS}
    return number


def difference(
    setting: str, reward: str, arm: str = "gdpo", over: str = "grpo", last: int = LAST
) -> Difference:
    """`arm` minus `over`, paired by seed."""
    mine, others = (ends(setting, each, reward, last) for each in (arm, over))
    return Difference(tuple(mine[seed] - others[seed] for seed in mine | others))


def missed(rival: str, reward: str) -> list[int]:
    """Return the seeds of the real model whose difference is outside the expectation."""
    low, high = MODEL[rival][reward]
    gains = difference("model", reward, over=rival).values
    seeds = ends("model", "gdpo", reward)
    return [seed for seed, gain in zip(seeds, gains, strict=True) if not low <= gain <= high]


def harms() -> dict[str, Difference]:
    """The answer, GDPO minus GRPO, at the levels of Holm's procedure."""
    gains = [difference(setting, "answer") for setting in HARMS]
    return dict(zip(HARMS, at_holms_levels(gains), strict=True))
