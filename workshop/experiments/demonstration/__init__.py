"""The demonstration's results: what each setting, arm and seed earned in each step."""

from functools import cache
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq

from workshop.experiments.differences import Difference
from workshop.experiments.trainer.compare import at_holms_levels

FILE = Path(__file__).with_name("demonstration.parquet")
LAST = 5  # steps of the primary endpoint
HARMS = ("bonus", "length", "noise")  # settings in which GDPO is meant to harm
# {(setting, reward): its highest value, by which its means are divided}
HIGHEST = {("model", "words"): 10}


@cache
def curves() -> dict[tuple[str, str, str], dict[int, list[float]]]:
    """Return {(setting, arm, reward): {seed: the mean of each step}}, with the seeds in order."""
    means: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in sorted(pq.read_table(FILE).to_pylist(), key=lambda row: (row["seed"], row["step"])):
        setting, arm, reward = row["setting"], row["arm"], row["reward"]
        of_seed = means.setdefault((setting, arm, reward), {}).setdefault(row["seed"], [])
        of_seed.append(row["mean"] / HIGHEST.get((setting, reward), 1))
    return means


def ends(setting: str, arm: str, reward: str) -> dict[int, float]:
    """Return {seed: the mean over the last steps}."""
    return {s: fmean(means[-LAST:]) for s, means in curves()[setting, arm, reward].items()}


def mean(setting: str, arm: str, reward: str) -> float:
    return fmean(ends(setting, arm, reward).values())


def difference(setting: str, reward: str, arm: str = "gdpo", over: str = "grpo") -> Difference:
    """`arm` minus `over`, paired by seed."""
    mine, others = ends(setting, arm, reward), ends(setting, over, reward)
    return Difference(tuple(mine[seed] - others[seed] for seed in mine | others))


def harms() -> dict[str, Difference]:
    """The answer, GDPO minus GRPO, at the levels of Holm's procedure."""
    gains = [difference(setting, "answer") for setting in HARMS]
    return dict(zip(HARMS, at_holms_levels(gains), strict=True))
