"""Compares estimators over the steps of a dump; keeps the most different groups.

The alternatives are compared with the advantages that the run logged. verl's own dump has none;
there they are compared with what verl's grpo makes of the dump's score. Estimators have different
scales, because GRPO has no batch step, so advantages are compared in units of their own standard
deviation over the step. Shape suffixes: B rollouts, G groups.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.metrics import correlation, terms_of_rows, tied_pairs
from verl_gdpo.algorithm.values import is_number
from verl_gdpo.algorithm.zero import SAME_STD, Bools, Floats, Ints, is_apart, is_the_sum, std_or_0
from verl_gdpo.hooks.configuration import has_own_scorer
from verl_gdpo.tools.advice import FIRST_STEPS, StepRewards
from verl_gdpo.tools.replay.arms import COMPUTED, Arm, ReplayedStep, group_numbers
from verl_gdpo.tools.run_folder.dump_reader import Scorer, read_dump

LOGGED = "logged"
OF_SCORE = "grpo of score"

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StepAdvantages:
    """The advantages of one estimator in one step."""

    A_B: Floats
    scaled_B: Floats  # in units of `std`
    std: float  # over the rollouts, ddof 0
    trained_B: Bools  # False in the groups in which all advantages are 0
    silent_groups: float  # the share of those groups
    tied_pairs: float | None  # share of pairs with different rewards that get one advantage

    @classmethod
    def of(
        cls, A_B: Floats, group_B: Ints, rewards: RewardMatrix, rows_B: Ints
    ) -> "StepAdvantages":
        """Return the column.

        Args:
            A_B, group_B: the advantage and the group number of each rollout.
            rewards: the rewards of all rows of the dump.
            rows_B: the row of each rollout in the dump.
        """
        std = std_or_0(A_B)
        if std > 0:
            scaled_B = A_B / std
        else:
            # A constant has no spread to divide by, and what float32 made of it is no difference.
            scaled_B = np.full_like(A_B, A_B.mean())
        active_G: Bools = np.bincount(group_B, is_apart(scaled_B)) > 0
        terms = terms_of_rows(rewards.terms, rows_B)
        rounded_B = np.round(scaled_B / SAME_STD)
        (tied,) = tied_pairs([rounded_B], terms.values_BM, terms.present_BM, terms.weights, group_B)
        return cls(
            A_B=A_B,
            scaled_B=scaled_B,
            std=std,
            trained_B=active_G[group_B],
            silent_groups=float(1 - active_G.mean()),
            tied_pairs=tied,
        )

    def correlation(self, other: "StepAdvantages") -> float | None:
        """Return the correlation of the advantages; None if one column is constant."""
        return correlation(self.scaled_B, other.scaled_B)

    def distance_B(self, other: "StepAdvantages") -> Floats:
        """Return |difference|, where no group that is silent in both counts in a std.

        Else the same groups would be further apart in a step that has more silent ones.
        """
        share = np.mean(self.trained_B | other.trained_B)
        result: Floats = np.abs(self.scaled_B - other.scaled_B) * np.sqrt(share)
        return result


class StepReport(NamedTuple):
    """The advantages of one step, by the name of who gives them."""

    number: int
    columns: Mapping[str, StepAdvantages]  # the reference, then each alternative

    @property
    def reference(self) -> StepAdvantages:
        """The advantages that the alternatives are compared with."""
        return next(iter(self.columns.values()))

    @property
    def sample_count(self) -> int:
        return len(self.reference.A_B)


@dataclass(frozen=True)
class Group:
    """The rollouts of a group, and their advantages in each column."""

    step: int
    id: str
    distance: Mapping[str, float]  # {alternative: mean scaled difference from the reference}
    rows: Rows
    advantages: Mapping[str, Sequence[float]]


class Mismatch(NamedTuple):
    """The row whose logged and recomputed advantage differ by the largest part of `allowed`."""

    difference: float
    allowed: float
    step: int
    uid: str

    @property
    def part(self) -> float:
        return self.difference / self.allowed


@dataclass
class Rescored:
    """How the scores of a `Scorer` compare with those in the dump, and with its own rewards."""

    rollouts: int = 0
    same: int = 0  # of them have the same score in the dump
    not_the_sum: int = 0  # of them have a `score` that is not the sum of their rewards

    def add(self, row: Mapping[str, Any]) -> None:
        score = row["scorer_score"]
        self.rollouts += 1
        if _close(row["score"], score):
            self.same += 1
        if not _close(score, row["sum"]):
            self.not_the_sum += 1

    def __str__(self) -> str:
        text = f"--scorer gives the dumped score in {self.same:,} of {self.rollouts:,} samples."
        if not self.not_the_sum:
            return text
        return (
            f"{text} WARNING: in {self.not_the_sum:,} samples its `score` is not the sum of its "
            "rewards. All of them count, unless algorithm.gdpo.rewards names some"
        )


def _close(a: Any, b: Any) -> bool:
    return is_number(a) and is_number(b) and bool(is_the_sum(float(a), float(b)))


@dataclass
class Replay:
    """Reads dumps; keeps numbers, and the rows of the `top` groups of each alternative."""

    own: Arm
    alternatives: Sequence[Arm]
    top: int = 0
    scorer: Scorer | None = None  # whose rewards replace those of the dump
    reference: str = ""  # LOGGED or OF_SCORE, once something is read
    rescored: Rescored = field(default_factory=Rescored)
    row_count: int = 0
    steps: list[StepReport] = field(default_factory=list)
    worst: Mismatch | None = None  # None if nothing is read, or the run's estimator is unknown
    most_different: dict[str, list[Group]] = field(default_factory=dict)
    evidence: list[StepRewards] = field(default_factory=list)  # of what GDPO would change

    @property
    def has_our_scorers(self) -> bool:
        """Whether the rewards are those of scorers of ours, as far as is known."""
        if self.scorer is not None:
            return self.scorer.task is not None
        return self.own.run is None or not has_own_scorer(self.own.run)

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
        """Take the rows of one step, with padding."""
        step = ReplayedStep.of(number, rows)
        own = step.matrix(self.own, self.has_our_scorers)
        self.row_count += len(rows)
        reference_B = self._reference(step)
        if self.own.estimator in COMPUTED and self.scorer is None:
            self._check_own(step, own, reference_B)

        rows_B = np.flatnonzero(step.rewards.counted_B)
        group_B = group_numbers(step.group_ids[rows_B])
        columns = {self.reference: StepAdvantages.of(reference_B[rows_B], group_B, own, rows_B)}
        for arm in self.alternatives:
            matrix = step.matrix(arm, self.has_our_scorers)
            A_B = step.advantages(arm, matrix)[rows_B]
            columns[arm.name] = StepAdvantages.of(A_B, group_B, matrix, rows_B)
        report = StepReport(number, columns)
        self.steps.append(report)

        if len(self.evidence) < FIRST_STEPS:
            self.evidence.append((own, step.rewards.counted_B, step.group_ids))
        counted = [rows[row] for row in rows_B.tolist()]
        if self.scorer:
            for row in counted:
                self.rescored.add(row)
        if self.top:
            self._keep_groups(report, counted, group_B)

    def _reference(self, step: ReplayedStep) -> Floats:
        """Return the advantage of each row that the alternatives are compared with."""
        if step.logged_B is not None:
            name = LOGGED
            A_B = step.logged_B
        else:
            name = OF_SCORE
            A_B = step.of_score(self.own.settings.normalize_by_std)
        if self.reference not in ("", name):
            raise ValueError(
                "some dumps hold advantages and some do not; replay each kind by itself, with "
                "--steps FIRST:LAST"
            )
        self.reference = name
        return A_B

    def _check_own(self, step: ReplayedStep, own: RewardMatrix, reference_B: Floats) -> None:
        """Keep the row that the run's own settings reproduce worst."""
        difference_B = np.abs(step.advantages(self.own, own) - reference_B)
        allowed_B = step.allowed(self.own, own)
        row = int((difference_B / allowed_B).argmax())
        mismatch = Mismatch(
            difference=float(difference_B[row]),
            allowed=float(allowed_B[row]),
            step=step.number,
            uid=step.rewards.labels[row],
        )
        if self.worst is None or mismatch.part > self.worst.part:
            self.worst = mismatch

    def _keep_groups(self, report: StepReport, rows: Rows, group_B: Ints) -> None:
        """Keep the groups of a step that are among the `top` of an alternative.

        Args:
            rows: of the dump, one for each rollout.
            group_B: the group number of each rollout.
        """
        size_G = np.bincount(group_B)
        distances_G = {}
        for name, column in report.columns.items():
            if name != self.reference:
                distance_B = column.distance_B(report.reference)
                distances_G[name] = np.bincount(group_B, distance_B) / size_G

        groups = []
        order = np.argsort(group_B, kind="stable")
        for number, members in enumerate(np.split(order, size_G.cumsum()[:-1])):
            group = Group(
                step=report.number,
                id=rows[members[0]]["group"],
                distance={name: of_G[number] for name, of_G in distances_G.items()},
                rows=[rows[i] for i in members],
                advantages={name: c.A_B[members].tolist() for name, c in report.columns.items()},
            )
            groups.append(group)

        for name in distances_G:
            known = list(self.most_different.get(name, []))
            known.extend(group for group in groups if group.distance[name] > SAME_STD)
            known.sort(key=lambda group: -group.distance[name])
            self.most_different[name] = known[: self.top]
