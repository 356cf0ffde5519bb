"""Groups of rollouts that show what the two estimators make of the same rewards.

A dump of 8,192 long rollouts has 80 MB. So a bounded number of dumps is read without texts, one at
a time. Only those of the chosen groups are kept, and their texts are read at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.metrics import verl_grpo_settings
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.zero import Floats, is_apart, to_6_decimals
from verl_gdpo.scoring.function_list import algorithm_of
from verl_gdpo.tools.advice import StepRewards
from verl_gdpo.tools.replay.arms import group_numbers
from verl_gdpo.tools.replay.comparison import StepAdvantages
from verl_gdpo.tools.report.runs import Run
from verl_gdpo.tools.run_folder.dump_reader import dumps_to_read, read_dump, read_texts, reward_rows

ROLLOUTS_SHOWN = 8  # of a group
KINDS = ("tied", "apart")  # the template says what they are


@dataclass(frozen=True)
class Rollout:
    output: str
    rewards: Mapping[str, float | None]  # as the estimator saw them; None does not apply
    logged: float | None  # None where verl-gdpo did not write the dump
    grpo: float
    gdpo: float


@dataclass(frozen=True)
class ExampleGroup:
    kind: str  # one of KINDS
    step: int
    prompt: str
    truth: str
    rollouts: Sequence[Rollout]  # at most `ROLLOUTS_SHOWN`, by their advantage under GDPO
    of: int  # rollouts of the group


@dataclass(frozen=True)
class RecomputedStep:
    """One dump without its texts, with the advantages recomputed."""

    file: Path
    dump: Sequence[Mapping[str, Any]]
    rewards: RewardMatrix
    grpo_B: Floats
    gdpo_B: Floats
    distance_B: Floats  # of the two advantages, each by its own scale
    groups: Sequence[Sequence[int]]  # the counted rows of each


def example_groups(run: Run) -> list[ExampleGroup]:
    """At most one group of each kind: the last tied one, and the other that differs most.

    GRPO and GDPO are recomputed as the paper defines them, with the run's rewards, weights and
    conditions; `logged` is what the run trained on.

    Raises:
        ValueError: there is no dump, or it has no rewards and the run has no scorer.
    """
    settings = settings_of(run)
    examples: dict[str, tuple[RecomputedStep, Sequence[int]]] = {}
    most = 0.0
    for file in reversed(dumps_to_read(run.dumps())):
        step = _recompute(file, run, settings)
        for rows in step.groups:
            distance = float(step.distance_B[rows].max())
            if _is_tied(step, rows):
                examples.setdefault("tied", (step, rows))
            elif distance > most:
                most, examples["apart"] = distance, (step, rows)
    return [_example(kind, *examples[kind]) for kind in KINDS if kind in examples]


def settings_of(run: Run) -> GdpoSettings:
    """Return the settings of a run, of which only those of its rewards are of use here."""
    return GdpoSettings() if run.config is None else read_settings(algorithm_of(run.config))


def read_step(file: Path, run: Run, settings: GdpoSettings) -> tuple[Any, StepRewards]:
    """Return the rows of a dump without their texts, and their rewards."""
    dump = read_dump(file, run.scorer, with_texts=False)
    rows = reward_rows(dump, int(file.stem))
    ids = np.array([row["group"] for row in dump])
    return dump, (RewardMatrix.of(rows, settings), rows.counted_B, ids)


def _recompute(file: Path, run: Run, settings: GdpoSettings) -> RecomputedStep:
    dump, (rewards, counted_B, ids) = read_step(file, run, settings)
    rows_B, group_B = np.flatnonzero(counted_B), group_numbers(ids[counted_B])
    grpo_B, gdpo_B = (
        scalars_of(rewards, counted_B, ids, each).A_B.numpy()
        for each in (verl_grpo_settings(GdpoSettings()), GdpoSettings())
    )
    grpo, gdpo = (
        StepAdvantages.of(A_B[rows_B], group_B, rewards, rows_B) for A_B in (grpo_B, gdpo_B)
    )
    distance_B = np.zeros(len(dump))
    distance_B[rows_B] = gdpo.distance_B(grpo)
    members: dict[str, list[int]] = {}
    for row in rows_B.tolist():
        members.setdefault(ids[row], []).append(row)
    return RecomputedStep(file, dump, rewards, grpo_B, gdpo_B, distance_B, [*members.values()])


def _is_tied(step: RecomputedStep, rows: Sequence[int]) -> bool:
    """Whether two rollouts have one advantage under GRPO, and two under GDPO."""
    grpo, gdpo = to_6_decimals(step.grpo_B[rows]), step.gdpo_B[rows]
    same_grpo, other_gdpo = grpo[:, None] == grpo, is_apart(gdpo[:, None] - gdpo)
    return bool((same_grpo & other_gdpo).any())


def _example(kind: str, step: RecomputedStep, rows: Sequence[int]) -> ExampleGroup:
    """A group with its prompt, ground truth and responses, which are read now."""
    by_gdpo = sorted(rows, key=lambda row: -step.gdpo_B[row])
    # at equal distances, and both ends
    places = np.linspace(0, len(rows) - 1, min(ROLLOUTS_SHOWN, len(rows))).round().astype(int)
    shown = [by_gdpo[place] for place in places]
    texts = read_texts(step.file, {*shown})
    first = texts[shown[0]]
    return ExampleGroup(
        *(kind, int(step.file.stem), str(first["input"] or ""), str(first["gts"] or "")),
        rollouts=[_rollout(step, row, str(texts[row]["output"] or "")) for row in shown],
        of=len(rows),
    )


def _rollout(step: RecomputedStep, row: int, output: str) -> Rollout:
    values, present = step.rewards.values_BK[row], step.rewards.present_BK[row]
    return Rollout(
        output=output,
        rewards={
            name: float(value) if is_there else None
            for name, value, is_there in zip(step.rewards.weights, values, present, strict=True)
        },
        logged=step.dump[row]["advantage"],
        grpo=float(step.grpo_B[row]),
        gdpo=float(step.gdpo_B[row]),
    )
