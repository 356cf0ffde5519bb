"""Recomputes and compares a dump step by step; keeps the numbers and the most different groups.

The alternatives are compared with the advantages that the run logged. verl's own dump has none;
there they are compared with what verl's grpo makes of the dump's score.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.advantage.zero import SAME_STD, is_the_sum
from verl_gdpo.atomic import replace_together
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.values import is_number
from verl_gdpo.run.dump_reader import read_dump
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.tools.advice.step import StepEvidence, look
from verl_gdpo.tools.replay.arms import Arm
from verl_gdpo.tools.replay.compare import Column
from verl_gdpo.tools.replay.recompute import Floats, Ints, Step, group_numbers

LOGGED, OF_SCORE = "logged", "grpo of score"
IDENTITY = (
    *("group", "session", "uid", "data_source"),
    *("response_tokens", "trained_tokens"),
)

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StepReport:
    number: int
    columns: Mapping[str, Column]  # the reference, then each alternative


@dataclass(frozen=True)
class Group:
    """The rollouts of a group, and their advantages in each column."""

    step: int
    id: str
    distance: Mapping[str, float]  # {alternative: mean scaled difference from the reference}
    rows: Rows
    advantages: Mapping[str, Sequence[float]]

    @property
    def rewards(self) -> list[str]:
        """The sorted rewards, which are equal for groups with the same rewards in any order."""
        return sorted(str(row["rewards"]) for row in self.rows)


@dataclass(frozen=True)
class Mismatch:
    """The row with the largest difference between the logged and the recomputed advantage."""

    difference: float
    step: int
    uid: str


@dataclass
class Rescored:
    """How the scores of a `Scorer` compare with those in the dump, and with its own rewards."""

    rollouts: int = 0
    other: int = 0  # of them have another score in the dump
    not_the_sum: int = 0  # of them have a `score` that is not the sum of their rewards
    example: str = ""  # one with another score

    def add(self, row: Mapping[str, Any]) -> None:
        dumped, score, total = (row[key] for key in ("score", "scorer_score", "sum"))
        self.rollouts += 1
        self.not_the_sum += not _close(score, total)
        if not _close(dumped, score):
            self.other += 1
            self.example = self.example or f"{row['uid']}: {dumped} in the dump, {score} now"


def _close(a: Any, b: Any) -> bool:
    return is_number(a) and is_number(b) and bool(is_the_sum(float(a), float(b)))


@dataclass
class Replay:
    """Reads dumps; keeps numbers, and the rows of the `top` groups of each alternative."""

    own: Arm
    alternatives: Sequence[Arm]
    top: int = 0
    wanted: str | None = None  # beginning of the id of a group to find
    keep_table: bool = False
    scorer: Scorer | None = None  # whose rewards replace those of the dump
    reference: str = ""  # LOGGED or OF_SCORE, once something is read
    rescored: Rescored = field(default_factory=Rescored)
    row_count: int = 0
    steps: list[StepReport] = field(default_factory=list)
    worst: Mismatch | None = None  # None if nothing is read, or the run's estimator is unknown
    most_different: dict[str, list[Group]] = field(default_factory=dict)
    found: list[Group] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)  # with `keep_table`, one DataFrame per step
    evidence: list[StepEvidence] = field(default_factory=list)  # of what GDPO would change

    def read(self, files: Iterable[Path]) -> "Replay":
        """Read the files; raise ValueError if the arms cannot be computed for one of them."""
        for file in files:
            rows = read_dump(file, self.scorer)
            try:
                self._add(int(file.stem), rows)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{file}: {error}") from None
        return self

    def _add(self, number: int, rows: Rows) -> None:
        step = Step.of(number, rows)
        own = RewardMatrix.of(step.rewards, self.own.settings)
        self.row_count += len(rows)
        reference_B = self._reference(step)
        if self.own.is_known and self.scorer is None:
            self._check(step, rows, step.advantages(self.own, own), reference_B)
        rows_B = np.flatnonzero(step.rewards.counted_B)
        group_B = group_numbers(step.group_ids[rows_B])
        columns = {self.reference: Column.of(reference_B[rows_B], group_B, own, rows_B)}
        names = dict.fromkeys([*own.weights, *self.own.settings.names])
        for arm in self.alternatives:
            matrix = RewardMatrix.of(step.rewards, arm.settings)
            A_B = step.advantages(arm, matrix)[rows_B]
            columns[arm.name] = Column.of(A_B, group_B, matrix, rows_B)
            names |= dict.fromkeys([*matrix.weights, *arm.settings.names])
        self.evidence.append(look(own, step.rewards.counted_B, step.group_ids))
        report = StepReport(number, columns)
        self.steps.append(report)
        counted = [rows[row] for row in rows_B.tolist()]
        for row in counted if self.scorer else ():
            self.rescored.add(row)
        self._keep_groups(report, counted, group_B)
        if self.keep_table:
            self.tables.append(_table(report, counted, names))

    def _reference(self, step: Step) -> Floats:
        name, A_B = LOGGED, step.logged_B
        if A_B is None:
            name, A_B = OF_SCORE, step.of_score(self.own.settings.normalize_by_std)
        if self.reference not in ("", name):
            raise ValueError(
                "some dumps hold advantages and some do not; replay each kind by itself, with "
                "--steps FIRST:LAST"
            )
        self.reference = name
        return A_B

    def _check(self, step: Step, rows: Rows, own_B: Floats, logged_B: Floats) -> None:
        difference_B = np.abs(own_B - logged_B)
        row = int(difference_B.argmax())
        if self.worst is None or difference_B[row] > self.worst.difference:
            self.worst = Mismatch(float(difference_B[row]), step.number, rows[row]["uid"])

    def _keep_groups(self, report: StepReport, rows: Rows, group_B: Ints) -> None:
        size_G = np.bincount(group_B)
        logged, *others = report.columns.items()
        distances = {
            name: np.bincount(group_B, column.distance_B(logged[1])) / size_G
            for name, column in others
        }

        def group(g: int) -> Group:
            members = np.flatnonzero(group_B == g).tolist()
            return Group(
                step=report.number,
                id=rows[members[0]]["group"],
                distance={name: float(distance_G[g]) for name, distance_G in distances.items()},
                rows=[rows[i] for i in members],
                advantages={name: c.A_B[members].tolist() for name, c in report.columns.items()},
            )

        for name, distance_G in distances.items() if self.top else []:
            kept = self.most_different.setdefault(name, [])
            for g in np.argsort(-distance_G, kind="stable").tolist():
                if distance_G[g] <= (
                    kept[-1].distance[name] if len(kept) == self.top else SAME_STD
                ):
                    break
                candidate = group(g)
                # a second group with the same rewards would show nothing new
                if candidate.rewards not in [other.rewards for other in kept]:
                    kept.append(candidate)
                    kept.sort(key=lambda other: -other.distance[name])
                    del kept[self.top :]
        if self.wanted is not None:
            first_G = np.unique(group_B, return_index=True)[1].tolist()
            ids = [rows[i]["group"] for i in first_G]
            self.found += [group(g) for g, name in enumerate(ids) if name.startswith(self.wanted)]


def write_table(replay: Replay, path: Path) -> int:
    """Write all rollouts to .parquet or .json, by the path's suffix; return their number."""
    import pandas as pd

    table = pd.concat(replay.tables, ignore_index=True)
    with replace_together(path) as (unfinished,):
        if path.suffix == ".parquet":
            table.to_parquet(unfinished, index=False)
        else:
            table.to_json(unfinished, orient="records", lines=True, double_precision=15)
    return len(table)


def _table(report: StepReport, rows: Rows, rewards: Iterable[str]) -> Any:
    """Return a DataFrame with one row per rollout; a missing reward is NaN."""
    import pandas as pd

    columns = {"step": report.number, **{name: [row[name] for row in rows] for name in IDENTITY}}
    for name in rewards:
        values = [row["rewards"].get(name) for row in rows]
        columns[f"reward/{name}"] = np.array(values, dtype=np.float64)
    columns |= {f"advantage/{name}": column.A_B for name, column in report.columns.items()}
    return pd.DataFrame(columns)
