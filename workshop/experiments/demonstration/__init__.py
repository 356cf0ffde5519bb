"""The demonstration's results: what each setting, arm and seed earned in each step."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq

from workshop.experiments.differences import Difference
from workshop.experiments.trainer.compare import at_holms_levels

FILE = Path(__file__).with_name("demonstration.parquet")
LAST = 5  # steps of the primary endpoint
# of the second protocol: bounds of the answer, GDPO minus GRPO, and GDPO with other weights minus it
EXPECTED = {
    "bonus": ((-1, -0.4), (-0.05, 0.05)),
    "length": ((-1, -0.1), (-0.05, 1)),
    "noise": ((-1, -0.1), (-0.05, 0.05)),
}

Curves = Mapping[int, Sequence[float]]  # {seed: the mean of each step}


@cache
def read_curves() -> dict[tuple[str, str, str], dict[int, list[float]]]:
    """Return {(setting, arm, reward): curves}, with the seeds in their order."""
    curves: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in sorted(pq.read_table(FILE).to_pylist(), key=lambda row: (row["seed"], row["step"])):
        of = curves.setdefault((row["setting"], row["arm"], row["reward"]), {})
        of.setdefault(row["seed"], []).append(row["mean"])
    return curves


def of(setting: str, arm: str, reward: str) -> Curves:
    return read_curves()[setting, arm, reward]


def ends(setting: str, arm: str, reward: str, last: int = LAST) -> dict[int, float]:
    """Return {seed: the mean over the last steps, or with 0 over all}."""
    return {seed: fmean(means[-last:]) for seed, means in of(setting, arm, reward).items()}


def mean(setting: str, arm: str, reward: str) -> float:
    return fmean(ends(setting, arm, reward).values())


def difference(
    setting: str, reward: str, arm: str = "gdpo", over: str = "grpo", last: int = LAST
) -> Difference:
    """`arm` minus `over`, paired by seed."""
    mine, others = (ends(setting, each, reward, last) for each in (arm, over))
    return Difference(tuple(mine[seed] - others[seed] for seed in mine))


def tested() -> dict[str, Difference]:
    """GDPO minus GRPO in the answer, each at the level at which Holm tests it."""
    gains = [difference(setting, "answer") for setting in EXPECTED]
    return dict(zip(EXPECTED, at_holms_levels(gains), strict=True))
