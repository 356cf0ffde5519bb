"""A dump step by step: recompute, compare, and keep the numbers and the groups worth a look."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.replay.arms import Arm
from verl_gdpo.replay.compare import SAME, Column, Difference, describe, difference
from verl_gdpo.replay.recompute import Floats, Ints, Step, group_index, matrices, recompute
from verl_gdpo.replay.rollout_table import RolloutTable
from verl_gdpo.reward_rows import RewardMatrix
from verl_gdpo.rollouts import read_dump

LOGGED = "logged"

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StepReport:
    number: int
    columns: Mapping[str, Column]  # LOGGED, then each alternative
    differences: Mapping[str, Difference]  # of each alternative from LOGGED


@dataclass(frozen=True)
class Group:
    """A group's rollouts, and what each column gives them."""

    step: int
    id: str
    distance: Mapping[str, float]  # mean scaled difference of each alternative from LOGGED
    rows: Rows
    advantages: Mapping[str, Sequence[float]]
    ties: Mapping[str, tuple[int, int]]  # two with different rewards and the same advantage

    @property
    def rewards(self) -> list[str]:
        """Equal for groups with the same rewards, in whatever order."""
        return sorted(str(row["rewards"]) for row in self.rows)


@dataclass(frozen=True)
class Mismatch:
    """The row whose logged advantage is furthest from what the run's settings give."""

    difference: float
    step: int
    uid: str


@dataclass
class Replay:
    """Feed it files; it keeps numbers, and the rows of `top` groups for each alternative."""

    own: Arm
    alternatives: Sequence[Arm]
    top: int = 0
    wanted: str | None = None  # groups whose id begins so
    table: RolloutTable | None = None
    row_count: int = 0
    steps: list[StepReport] = field(default_factory=list)
    worst: Mismatch | None = None  # None: nothing read, or the run's estimator is not known
    most_different: dict[str, list[Group]] = field(default_factory=dict)
    found: list[Group] = field(default_factory=list)

    def read(self, files: Iterable[Path]) -> "Replay":
        """Raises ValueError, with the file, for a dump that the arms cannot be computed from."""
        for file in files:
            rows = read_dump(file)
            try:
                self._add(int(file.stem), rows)
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{file}: {error}") from None
        return self

    def _add(self, number: int, rows: Rows) -> None:
        step = Step.of(number, rows)
        own_matrix, *others = matrices(step, [self.own, *self.alternatives])
        self.row_count += len(rows)
        if self.own.is_known:
            self._check(step, rows, recompute(step, self.own, own_matrix))
        rows_B = np.flatnonzero(step.rewards.counted_B)
        group_B = group_index(np.array(step.group_ids)[rows_B])
        columns = {LOGGED: describe(step.logged_B[rows_B], group_B, own_matrix, rows_B)}
        for arm, matrix in zip(self.alternatives, others, strict=True):
            A_B = recompute(step, arm, matrix)[rows_B]
            columns[arm.name] = describe(A_B, group_B, matrix, rows_B)
        differences = {
            arm.name: difference(columns[LOGGED], columns[arm.name]) for arm in self.alternatives
        }
        report = StepReport(number, columns, differences)
        self.steps.append(report)
        counted = [rows[row] for row in rows_B.tolist()]
        ids = [step.group_ids[row] for row in rows_B.tolist()]
        self._keep_groups(report, counted, group_B, ids)
        if self.table is not None:
            names = self._reward_names([own_matrix, *others])
            values = {name: column.A_B for name, column in columns.items()}
            self.table.add(number, counted, names, values)

    def _check(self, step: Step, rows: Rows, own_B: Floats) -> None:
        difference_B = np.abs(own_B - step.logged_B)
        row = int(difference_B.argmax())
        if self.worst is None or difference_B[row] > self.worst.difference:
            self.worst = Mismatch(float(difference_B[row]), step.number, rows[row]["uid"])

    def _keep_groups(
        self, report: StepReport, rows: Rows, group_B: Ints, ids: Sequence[str]
    ) -> None:
        size_G = np.bincount(group_B)
        distances = {
            name: np.bincount(group_B, d.distance_B) / size_G
            for name, d in report.differences.items()
        }
        id_of = dict(zip(group_B.tolist(), ids, strict=True))
        for name, distance_G in distances.items() if self.top else []:
            kept = self.most_different.setdefault(name, [])
            for g in np.argsort(-distance_G, kind="stable").tolist():
                if distance_G[g] <= (kept[-1].distance[name] if len(kept) == self.top else SAME):
                    break
                group = _group(report, rows, group_B, g, id_of[g], distances)
                # another group with the same rewards would show nothing new
                if group.rewards not in [other.rewards for other in kept]:
                    kept.append(group)
                    kept.sort(key=lambda group: -group.distance[name])
                    del kept[self.top :]
        if self.wanted is not None:
            for g, group_id in sorted(id_of.items()):
                if group_id.startswith(self.wanted):
                    self.found.append(_group(report, rows, group_B, g, group_id, distances))

    def _reward_names(self, matrices: Sequence[RewardMatrix]) -> list[str]:
        """Every reward that an arm weighs, or reads in a condition."""
        weighed = [name for matrix in matrices for name in matrix.weights]
        read = [name for arm in (self.own, *self.alternatives) for name in arm.settings.names]
        return list(dict.fromkeys([*weighed, *read]))


def _group(
    report: StepReport,
    rows: Rows,
    group_B: Ints,
    g: int,
    group_id: str,
    distances: Mapping[str, Floats],
) -> Group:
    members = np.flatnonzero(group_B == g)
    ties = {name: _first_tie(column, members) for name, column in report.columns.items()}
    return Group(
        step=report.number,
        id=group_id,
        distance={name: float(distance_G[g]) for name, distance_G in distances.items()},
        rows=[rows[i] for i in members.tolist()],
        advantages={name: column.A_B[members].tolist() for name, column in report.columns.items()},
        ties={name: tie for name, tie in ties.items() if tie is not None},
    )


def _first_tie(column: Column, members: Ints) -> tuple[int, int] | None:
    """Positions in `members`."""
    first: dict[int, int] = {}
    for position, (tied, rewards) in enumerate(
        zip(column.tied_B[members].tolist(), column.rewards_B[members].tolist(), strict=True)
    ):
        other = first.setdefault(tied, position)
        if column.rewards_B[members[other]] != rewards:
            return other, position
    return None
