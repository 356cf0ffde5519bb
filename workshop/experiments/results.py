"""The results of the experiments, one Parquet file an edition: what the pages and pictures need.

Nothing is trained here. Commit ee55291 has the programs that trained, and a file of each result.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo.atomic import replace_together

HERE = Path(__file__).parent
SIMULATION = HERE / "map" / "simulation.parquet"  # a row a setting
BANDIT = HERE / "bandit" / "bandit.parquet"  # a row a training of the small policy and reward
EDITIONS = {  # of the experiment with verl's trainer: a row a run and reward
    1: HERE / "trainer" / "first_edition.parquet",
    2: HERE / "trainer" / "second_edition.parquet",
    3: HERE / "trainer" / "new_seeds.parquet",  # protocol_3.md
}
# {(optimizer, arm): {"shares" or "small": one number a draw}}
Outcomes = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]


class Run(NamedTuple):
    setting: str
    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.setting}-{self.arm}-{self.seed}"


class Trained(NamedTuple):
    """What a run in verl's trainer gave.

    shares: {reward: share of it that the samples of each step earned, from 0 to 1}; in the first
        edition "small" and "large" are the rewards of the smaller and of the larger range.
    varies: {reward: share of the groups of each step in which it varies}; of the second edition.
    spread: {reward: its standard deviation within a group, the mean over the groups}; the same.
    start: shares of 256 samples of the starting policy that meet a reward, if they were counted.
    """

    shares: Mapping[str, Sequence[float]]
    varies: Mapping[str, Sequence[float]]
    spread: Mapping[str, Sequence[float]]
    start: Sequence[float]
    seconds: float


def write(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Replace a file of results, or leave it as it was."""
    with replace_together(path) as [new]:
        pq.write_table(pa.Table.from_pylist(rows), new, compression="zstd")


def read_trained(path: Path) -> dict[Run, Trained]:
    """All runs of an edition, but for those that were made again on another machine."""
    runs: dict[Run, Trained] = {}
    for row in pq.read_table(path).to_pylist():
        if not row["replaced"]:
            run = Run(row["setting"], row["arm"], row["seed"])
            result = runs.setdefault(run, Trained({}, {}, {}, row["start"], row["seconds"]))
            for name in ("shares", "varies", "spread"):
                getattr(result, name)[row["reward"]] = row[name]
    return runs


@cache
def read_simulated() -> dict[str, Outcomes]:
    """{setting: what its trainings earned}."""
    return {
        row["setting"]: {(of["optimizer"], of["arm"]): of for of in row["outcomes"]}
        for row in pq.read_table(SIMULATION).to_pylist()
    }
