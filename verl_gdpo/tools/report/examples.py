"""Groups of rollouts that show what the two estimators make of the same rewards.

A dump of 8,192 long rollouts has 80 MB. So a bounded number of dumps is read, one at a time and
without its texts, and the texts of the chosen groups alone are read at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.advantage.zero import is_apart, to_6_decimals
from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import verl_grpo_settings
from verl_gdpo.run.dump_reader import (
    LAST_DUMPS,
    dumps_to_read,
    read_dump,
    read_texts,
    reward_rows,
)
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.tools.replay.arms import group_numbers
from verl_gdpo.tools.replay.comparison import Column
from verl_gdpo.tools.report.runs import Run

KINDS = {
    "tied": "different rewards, one advantage under GRPO",
    "cancelled": "the rewards vary, their sum does not",
    "apart": "where GDPO and GRPO differ most",
    "equal": "every rollout has the same rewards",
}
MEANING = {
    "tied": "GRPO sees the weighted sum alone, so rollouts that earned it in different ways are "
    "pushed equally. GDPO tells them apart.",
    "cancelled": "GRPO finds no gradient here. GDPO has one unless the normalised rewards cancel.",
    "apart": "Of the groups of the steps that were read, the one in which the two advantages of a "
    "rollout differ most, each in units of its standard deviation over the groups with a gradient.",
    "equal": "Nothing to prefer: the advantage is 0 under both.",
}


@dataclass(frozen=True)
class Rollout:
    output: str
    tokens: int | None  # None, like `logged`, where verl-gdpo did not write the dump
    rewards: Mapping[str, float | None]  # as the estimator saw them; None does not apply
    logged: float | None
    grpo: float
    gdpo: float


@dataclass(frozen=True)
class ExampleGroup:
    kind: str  # a key of KINDS
    step: int
    prompt: str
    truth: str
    rollouts: Sequence[Rollout]


@dataclass(frozen=True)
class _Step:
    """One dump with the advantages recomputed; B rows, of which `groups` index the counted."""

    number: int
    dump: Sequence[Mapping[str, Any]]
    rewards: RewardMatrix
    grpo_B: npt.NDArray[np.float64]
    gdpo_B: npt.NDArray[np.float64]
    distance_B: npt.NDArray[np.float64]  # of the two advantages, each by its own scale
    groups: Sequence[Sequence[int]]


def example_groups(run: Run) -> list[ExampleGroup]:
    """At most one group of each kind, in the order of `KINDS`.

    The group that differs most is that of the dumps that are read, the others are of the last ones.
    GRPO and GDPO are recomputed as the paper defines them, with the run's rewards, weights and
    conditions; `logged` is what the run trained on.

    Raises:
        ValueError: there is no dump, or it has no rewards and the run has no scorer.
    """
    settings = settings_of(run)
    found: dict[str, tuple[Path, Sequence[int], ExampleGroup]] = {}
    most = 0.0
    for number, file in enumerate(reversed(dumps_to_read(run.dumps()))):
        dump = read_dump(file, run.scorer, with_texts=False)
        step = _recompute(dump, int(file.stem), settings)
        for rows in step.groups:
            kind, distance = _kind(step, rows), float(step.distance_B[rows].max())
            if kind and kind not in found and number < LAST_DUMPS:
                found[kind] = file, rows, _example(kind, step, rows)
            elif kind is None and distance > most:
                most = distance
                found["apart"] = file, rows, _example("apart", step, rows)
    return [_with_texts(*found[kind]) for kind in KINDS if kind in found]


def settings_of(run: Run) -> GdpoSettings:
    """Return the paper's settings, with the rewards, weights and conditions of a run."""
    if run.config is None:
        return GdpoSettings()
    return GdpoSettings(rewards=GdpoSettings.from_algorithm(run.config.algorithm).rewards)


def _recompute(dump: Sequence[Mapping[str, Any]], number: int, settings: GdpoSettings) -> _Step:
    rows = reward_rows(dump, number)
    rewards, counted_B = RewardMatrix.of(rows, settings), rows.counted_B
    ids = np.array([row["group"] for row in dump])
    rows_B, group_B = np.flatnonzero(counted_B), group_numbers(ids[counted_B])
    grpo_B, gdpo_B = (
        scalars_of(rewards, counted_B, ids, each).A_B.numpy()
        for each in (verl_grpo_settings(GdpoSettings()), GdpoSettings())
    )
    grpo, gdpo = (Column.of(A_B[rows_B], group_B, rewards, rows_B) for A_B in (grpo_B, gdpo_B))
    distance_B = np.zeros(len(dump))
    distance_B[rows_B] = gdpo.distance_B(grpo)
    members: dict[str, list[int]] = {}
    for row in rows_B.tolist():
        members.setdefault(ids[row], []).append(row)
    return _Step(number, dump, rewards, grpo_B, gdpo_B, distance_B, [*members.values()])


def _kind(step: _Step, rows: Sequence[int]) -> str | None:
    distinct = np.unique(
        np.hstack([step.rewards.values_BK[rows], step.rewards.present_BK[rows]]), axis=0
    )
    if len(distinct) == 1:
        return "equal"
    grpo, gdpo = to_6_decimals(step.grpo_B[rows]), step.gdpo_B[rows]
    if not grpo.any():
        return "cancelled"
    same_grpo, other_gdpo = grpo[:, None] == grpo, is_apart(gdpo[:, None] - gdpo)
    return "tied" if (same_grpo & other_gdpo).any() else None


def _example(kind: str, step: _Step, rows: Sequence[int]) -> ExampleGroup:
    return ExampleGroup(kind, step.number, "", "", [_rollout(step, row) for row in rows])


def _with_texts(file: Path, rows: Sequence[int], example: ExampleGroup) -> ExampleGroup:
    """The example with its prompt, ground truth and responses, which are read again."""
    texts = read_texts(file, {*rows})
    first = texts[rows[0]]
    return replace(
        example,
        prompt=str(first["input"] or ""),
        truth=str(first["gts"] or ""),
        rollouts=[
            replace(rollout, output=str(texts[row]["output"] or ""))
            for row, rollout in zip(rows, example.rollouts, strict=True)
        ],
    )


def _rollout(step: _Step, row: int) -> Rollout:
    matrix, dumped = step.rewards, step.dump[row]
    return Rollout(
        output="",
        tokens=dumped["response_tokens"],
        rewards={
            name: float(matrix.values_BK[row, column]) if matrix.present_BK[row, column] else None
            for column, name in enumerate(matrix.weights)
        },
        logged=dumped["advantage"],
        grpo=float(step.grpo_B[row]),
        gdpo=float(step.gdpo_B[row]),
    )
