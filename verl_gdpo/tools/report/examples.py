"""Groups of rollouts that show what the two estimators make of the same rewards.

A dump of 8,192 long rollouts has 80 MB. So a bounded number of dumps is read without texts, one at
a time. Only those of the chosen groups are kept, and their texts are read at the end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


class ReadStep(NamedTuple):
    """One dump without its texts, and its rewards."""

    dump: Sequence[Mapping[str, Any]]
    rewards: StepRewards


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


class GroupOfStep(NamedTuple):
    """A group, as the rows of a dump."""

    step: RecomputedStep
    rows: Sequence[int]


def example_groups(run: Run) -> list[ExampleGroup]:
    """At most one group of each kind: the last tied one, and the other that differs most.

    GRPO and GDPO are recomputed as the paper defines them, with the run's rewards, weights and
    conditions; `logged` is what the run trained on.

    Raises:
        ValueError: there is no dump, or it has no rewards and the run has no scorer.
    """
    settings = settings_of(run)
    found: dict[str, GroupOfStep] = {}  # by kind
    farthest = 0.0
    # The last step comes first, so that the first tied group is the last one of the run.
    for file in reversed(dumps_to_read(run.dumps())):
        step = _recompute(file, run, settings)
        for rows in step.groups:
            distance = float(step.distance_B[rows].max())
            if _is_tied(step, rows):
                found.setdefault("tied", GroupOfStep(step, rows))
            elif distance > farthest:
                farthest = distance
                found["apart"] = GroupOfStep(step, rows)
    return [_example(kind, found[kind]) for kind in KINDS if kind in found]


def settings_of(run: Run) -> GdpoSettings:
    """Return the settings of a run, of which only those of its rewards are of use here."""
    if run.config is None:
        return GdpoSettings()
    return read_settings(algorithm_of(run.config))


def read_step(file: Path, run: Run, settings: GdpoSettings) -> ReadStep:
    """Return the rows of a dump without their texts, and their rewards."""
    dump = read_dump(file, run.scorer, with_texts=False)
    rows = reward_rows(dump, int(file.stem))
    ids = np.array([row["group"] for row in dump])
    rewards = RewardMatrix.of(rows, settings)
    return ReadStep(dump, (rewards, rows.counted_B, ids))


def _recompute(file: Path, run: Run, settings: GdpoSettings) -> RecomputedStep:
    """Return a step with the advantages of both estimators; rows that do not count have 0."""
    read = read_step(file, run, settings)
    rewards, counted_B, ids = read.rewards
    gdpo_settings = GdpoSettings()
    grpo_settings = verl_grpo_settings(gdpo_settings)
    grpo_B = scalars_of(rewards, counted_B, ids, grpo_settings).A_B.numpy()
    gdpo_B = scalars_of(rewards, counted_B, ids, gdpo_settings).A_B.numpy()

    counted_rows = np.flatnonzero(counted_B)
    counted_groups = group_numbers(ids[counted_B])
    grpo = StepAdvantages.of(grpo_B[counted_rows], counted_groups, rewards, counted_rows)
    gdpo = StepAdvantages.of(gdpo_B[counted_rows], counted_groups, rewards, counted_rows)
    distance_B = np.zeros(len(read.dump))
    distance_B[counted_rows] = gdpo.distance_B(grpo)

    rows_of: dict[str, list[int]] = {}  # by the id of a group
    for row in counted_rows.tolist():
        rows_of.setdefault(ids[row], []).append(row)
    groups = list(rows_of.values())
    return RecomputedStep(file, read.dump, rewards, grpo_B, gdpo_B, distance_B, groups)


def _is_tied(step: RecomputedStep, rows: Sequence[int]) -> bool:
    """Whether two rollouts have one advantage under GRPO, and two under GDPO."""
    grpo = to_6_decimals(step.grpo_B[rows])
    gdpo = step.gdpo_B[rows]
    # Matrices that compare each rollout of the group with each other one.
    have_same_grpo = grpo[:, None] == grpo
    have_other_gdpo = is_apart(gdpo[:, None] - gdpo)
    return bool((have_same_grpo & have_other_gdpo).any())


def _example(kind: str, group: GroupOfStep) -> ExampleGroup:
    """A group with its prompt, ground truth and responses, which are read now."""
    step = group.step
    by_gdpo = sorted(group.rows, key=lambda row: -step.gdpo_B[row])
    # The best and the worst, and others at equal distances between them.
    count = min(ROLLOUTS_SHOWN, len(by_gdpo))
    places = np.linspace(0, len(by_gdpo) - 1, count).round().astype(int)
    shown = [by_gdpo[place] for place in places]
    texts = read_texts(step.file, set(shown))
    # The prompt and the ground truth are the same in all rows of a group.
    first = texts[shown[0]]
    return ExampleGroup(
        kind=kind,
        step=int(step.file.stem),
        prompt=str(first["input"] or ""),
        truth=str(first["gts"] or ""),
        rollouts=[_rollout(step, row, str(texts[row]["output"] or "")) for row in shown],
        of=len(group.rows),
    )


def _rollout(step: RecomputedStep, row: int, output: str) -> Rollout:
    values_K = step.rewards.values_BK[row]
    present_K = step.rewards.present_BK[row]
    rewards: dict[str, float | None] = {}
    for name, value, is_present in zip(step.rewards.weights, values_K, present_K, strict=True):
        rewards[name] = float(value) if is_present else None
    return Rollout(
        output=output,
        rewards=rewards,
        logged=step.dump[row]["advantage"],
        grpo=float(step.grpo_B[row]),
        gdpo=float(step.gdpo_B[row]),
    )
