"""Differences between arms, each with an interval that allows for chance and for the others.

The intervals are simultaneous: all of a report hold the true differences in 95 of 100 reports, by
Student's t and Bonferroni's correction. Runs are compared in pairs where both arms have the same
seeds and the same rows, and as independent (Welch) where they have not.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_gdpo.run.folder import Metrics, training_rewards, validation_rewards
from verl_gdpo.tools.report.runs import Run, RunsOfArm
from verl_gdpo.tools.report.sections import MAIN_ARM, SMOOTHED_STEPS, ReadEach, names
from verl_gdpo.tools.report.tables import Table

CONFIDENCE = 0.95  # of all intervals of a report together
ROUNDING = 1e-9  # of runs that are all alike
FEWEST_RUNS = 2  # of an arm, for an interval
SAME_ROWS = ("data.train_files", "data.train_batch_size", "actor_rollout_ref.rollout.n")


@dataclass(frozen=True)
class Difference:
    """The end of one reward in one arm, less that of another."""

    reward: str
    arm: str
    other: str
    value: float
    low: float
    high: float
    is_paired: bool

    @property
    def is_claimed(self) -> bool:
        return self.low > ROUNDING or self.high < -ROUNDING


def differences_of_arms(arms: Sequence[RunsOfArm]) -> list[Difference]:
    """The main arm against each other one, in each reward that all their runs have."""
    several = [arm for arm in arms if len(arm.runs) >= FEWEST_RUNS]
    if len(several) < 2:
        return []
    main = next((arm for arm in several if arm.name == MAIN_ARM), several[0])
    pairs = [
        (name, other, values, others)
        for other in several
        if other is not main
        for name, read in _rewards(arms)
        if (values := _ends(main, read, name)) and (others := _ends(other, read, name))
    ]
    level = 1 - (1 - CONFIDENCE) / max(len(pairs), 1)
    return [
        _difference(name, main, other, values, others, level)
        for name, other, values, others in pairs
    ]


def table_of_differences(arms: Sequence[RunsOfArm]) -> Table | None:
    """None where no two arms have several runs."""
    found = differences_of_arms(arms)
    if not found:
        return None
    rows = [
        (
            one.reward,
            f"{one.arm} less {one.other}",
            f"{one.value:+.3f}",
            f"{one.low:+.3f} to {one.high:+.3f}",
            "paired by seed" if one.is_paired else "independent",
            "a difference" if one.is_claimed else "may be chance",
        )
        for one in found
    ]
    caption = (
        f"Differences at the end, with intervals that hold for all {len(found)} together in "
        f"{CONFIDENCE:.0%} of reports: of the last validation, or, without one, of the mean of "
        f"the last {SMOOTHED_STEPS} steps"
    )
    header = ("reward", "arms", "difference", "interval", "runs are", "which is")
    return Table(caption, header, rows, labels=2)


def _rewards(arms: Sequence[RunsOfArm]) -> list[tuple[str, ReadEach]]:
    """Each reward with what is read of it: validation where there is one."""
    measured = names(arms, validation_rewards)
    trained = [name for name in names(arms, training_rewards) if name not in measured]
    return [
        *((name, validation_rewards) for name in measured),
        *((name, training_rewards) for name in trained),
    ]


def _ends(arm: RunsOfArm, read: ReadEach, name: str) -> list[float]:
    """One number of each run; none if a run has no such number."""
    found = [_end(run.metrics, read, name) for run in arm.runs]
    return [] if any(map(math.isnan, found)) else found


def _end(metrics: Metrics, read: ReadEach, name: str) -> float:
    curve = {step: value for step, value in read(metrics).get(name, {}).items() if step > 0}
    steps = sorted(curve)[-(1 if read is validation_rewards else SMOOTHED_STEPS) :]
    return statistics.fmean(curve[step] for step in steps) if steps else math.nan


def _difference(
    name: str,
    arm: RunsOfArm,
    other: RunsOfArm,
    values: Sequence[float],
    others: Sequence[float],
    level: float,
) -> Difference:
    from scipy import stats

    if seeds := _common_order(arm, other):
        each = np.array(values) - np.array(others)[seeds]
        value, error = float(each.mean()), float(each.std(ddof=1)) / math.sqrt(len(each))
        freedom = len(each) - 1.0
    else:
        parts = [np.var(v, ddof=1) / len(v) for v in (values, others)]
        value, error = float(np.mean(values) - np.mean(others)), math.sqrt(sum(parts))
        below = [p**2 / (len(v) - 1) for p, v in zip(parts, (values, others), strict=True)]
        freedom = sum(parts) ** 2 / sum(below) if sum(below) else 1.0
    half = error * float(stats.t.ppf((1 + level) / 2, freedom))
    return Difference(
        name, arm.name, other.name, value, value - half, value + half, is_paired=bool(seeds)
    )


def _common_order(arm: RunsOfArm, other: RunsOfArm) -> list[int]:
    """For each run of `arm`, the number of the run of `other` with its seed and its rows."""
    number_of = {_rows_of(run): number for number, run in enumerate(other.runs)}
    mine = [_rows_of(run) for run in arm.runs]
    is_same = {*mine} == {*number_of} and len(mine) == len({*mine}) == len(other.runs)
    return [number_of[rows] for rows in mine] if is_same and _has_seeds(arm.runs) else []


def _has_seeds(runs: Sequence[Run]) -> bool:
    return all(run.setting("data.seed") is not None for run in runs)


def _rows_of(run: Run) -> tuple[str, ...]:
    settings: Mapping[str, str] = {key: str(run.setting(key)) for key in SAME_ROWS}
    return str(run.setting("data.seed")), *settings.values()
