"""The demonstration's results: what each arm and seed earned in each step."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pyarrow.parquet as pq

FILE = Path(__file__).with_name("demonstration.parquet")
LAST = 5  # steps of the primary endpoint


class Curve(NamedTuple):
    arm: str
    seed: int
    reward: str
    means: Sequence[float]  # one a step

    @property
    def end(self) -> float:
        return fmean(self.means[-LAST:])


@cache
def read_curves() -> list[Curve]:
    """Return a curve for each arm, seed and reward, sorted by seed."""
    means: dict[tuple[str, int, str], list[float]] = {}
    for row in sorted(pq.read_table(FILE).to_pylist(), key=lambda row: (row["seed"], row["step"])):
        means.setdefault((row["arm"], row["seed"], row["reward"]), []).append(row["mean"])
    return [Curve(*key, steps) for key, steps in means.items()]


def of(arm: str, reward: str) -> list[Curve]:
    return [curve for curve in read_curves() if (curve.arm, curve.reward) == (arm, reward)]


def seeds() -> list[int]:
    return sorted({curve.seed for curve in read_curves()})


def end(arm: str, seed: int, reward: str) -> float:
    [curve] = [curve for curve in of(arm, reward) if curve.seed == seed]
    return curve.end
