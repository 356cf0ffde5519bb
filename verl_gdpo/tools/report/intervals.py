"""Differences of two arms at the end of their runs, with intervals.

An interval allows for chance and for the other comparisons: those of a report hold their true
differences together in `CONFIDENCE` of all reports. Each is Student's t. How wide it has to be
follows from the correlations of the comparisons: what correlates errs together, and needs less room
than what does not (the single-step max-t method of Westfall and Young, under normality). Below five
runs the correlations are not known, and the risk is split evenly (Bonferroni). Runs are compared in
pairs where both arms have the same seeds and the same rows, and as independent (Welch) where they
have not.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
from scipy import stats

from verl_gdpo.algorithm.zero import NO_SIGNAL, Floats
from verl_gdpo.tools.report.runs import (
    FEWEST_FOR_BAND,
    FEWEST_RUNS,
    MAIN_ARM,
    SMOOTHED_STEPS,
    TESTED,
    TRAINED,
    ReadEach,
    Run,
    RunsOfArm,
    last_common_step,
    names,
)

# Of all intervals of a report together. Five seeds an arm are few, so that 0.95 would miss a
# difference of two standard deviations in more than two of ten reports of two rewards.
CONFIDENCE = 0.93
DRAWS = 20_000
SAME_ROWS = ("data.train_files", "data.train_batch_size", "actor_rollout_ref.rollout.n")


@dataclass(frozen=True)
class Difference:
    """The end of one reward in one arm, less that of another."""

    reward: str
    arm: str
    other: str
    samples: Sequence[Floats]  # a number of each pair of runs, or of each run of both arms
    risk: float = math.nan  # that the interval does not hold the true difference

    @property
    def is_paired(self) -> bool:
        return len(self.samples) == 1

    @cached_property
    def unit(self) -> float:
        """The largest number, in units of which the squares of the others are no overflow."""
        return max(float(np.abs(sample).max()) for sample in self.samples) or 1.0

    @cached_property
    def in_units(self) -> Sequence[Floats]:
        return [sample / self.unit for sample in self.samples]

    @property
    def value(self) -> float:
        means = [float(sample.mean()) for sample in self.in_units]
        if self.is_paired:
            return means[0] * self.unit
        mine, theirs = means
        return (mine - theirs) * self.unit

    @property
    def errors(self) -> Floats:
        """What each run, or pair of runs, adds to the error of `value`, in units of `unit`."""
        errors = [(sample - sample.mean()) / len(sample) for sample in self.in_units]
        if not self.is_paired:
            # `value` is the first mean less the second.
            errors[1] = -errors[1]
        return np.concatenate(errors)

    @cached_property
    def half(self) -> float:
        """Half of the width of the interval."""
        variance = 0.0  # of `value`
        below = 0.0
        for sample in self.in_units:
            variance_of_mean = float(np.var(sample, ddof=1)) / len(sample)
            variance += variance_of_mean
            below += variance_of_mean**2 / (len(sample) - 1)
        # Welch and Satterthwaite; of one sample it is the number of pairs less 1. Runs that do not
        # differ leave 0 / 0, and an interval of no width whatever the freedom is.
        freedom = 1.0
        if below != 0:
            freedom = variance**2 / below
        return self.unit * math.sqrt(variance) * float(stats.t.isf(self.risk / 2, freedom))

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    @property
    def is_claimed(self) -> bool:
        return self.low > NO_SIGNAL or self.high < -NO_SIGNAL


def differences_of_arms(arms: Sequence[RunsOfArm]) -> list[Difference]:
    """The main arm against each other one, in each reward that all their runs have."""
    several = [arm for arm in arms if len(arm.runs) >= FEWEST_RUNS]
    if len(several) < 2:
        return []
    main = next((arm for arm in several if arm.name == MAIN_ARM), several[0])
    last = last_common_step(arms)
    rewards = dict.fromkeys(names(arms, TESTED) + names(arms, TRAINED))
    differences = []
    for other in several:
        if other is main:
            continue
        for name in rewards:
            difference = _difference(main, other, name, last)
            if difference is not None:
                differences.append(difference)
    return _with_risks(differences)


def _difference(arm: RunsOfArm, other: RunsOfArm, name: str, last: int) -> Difference | None:
    """The difference of two arms in one reward, without its risk; None where a run lacks it.

    It is of the validation, unless a run has none of this reward.
    """
    runs = [*arm.runs, *other.runs]
    read = TESTED
    steps = _common_steps(runs, read, name, last)
    if not steps:
        read = TRAINED
        steps = _common_steps(runs, read, name, last)
    if not steps:
        return None
    values = _ends(arm, read, name, steps)
    others = _ends(other, read, name, steps)
    if not values or not others:
        return None
    return Difference(name, arm.name, other.name, _samples(arm, other, values, others))


def _with_risks(differences: Sequence[Difference]) -> list[Difference]:
    """The comparisons with the chance to err that each may have, in the same order.

    Together they err with 1 - `CONFIDENCE`.
    """
    # Comparisons over the same runs are a family, whose errors correlate. Those in pairs are one.
    families: dict[str, list[Difference]] = {}
    for difference in differences:
        families.setdefault(_family_of(difference), []).append(difference)

    risk_of: dict[str, float] = {}  # of each comparison of a family
    for family, members in families.items():
        risk = (1 - CONFIDENCE) * len(members) / len(differences)
        fewest = min(len(sample) for member in members for sample in member.samples)
        if fewest >= FEWEST_FOR_BAND:
            errors_NK = np.stack([member.errors for member in members], axis=1)
            risk_of[family] = risk_of_each(errors_NK, risk)
        else:
            risk_of[family] = risk / len(members)
    return [replace(each, risk=risk_of[_family_of(each)]) for each in differences]


def _family_of(difference: Difference) -> str:
    return "" if difference.is_paired else difference.other


def risk_of_each(errors_NK: Floats, risk: float) -> float:
    """The risk of one of K comparisons of N runs, for which some of them errs with `risk`.

    Errors that are normal and have the correlations of `errors_NK` are drawn many times, for the
    largest |t| of each draw. The result is at least `risk` / K, and `risk` where all err together.
    """
    N, K = errors_NK.shape
    lengths_K = np.linalg.norm(errors_NK, axis=0)
    # A comparison without any error has no direction, and stays 0.
    unit_NK = errors_NK / np.where(lengths_K > 0, lengths_K, 1.0)
    # t is sqrt(N - 1) / tan of the angle between the errors and a direction drawn at random.
    cosines = np.abs(_directions(N) @ unit_NK)
    cosine = float(np.quantile(cosines.max(axis=1), 1 - risk))
    t = math.sqrt((N - 1) / (1 - cosine**2)) * cosine
    return float(np.clip(2 * stats.t.sf(t, N - 1), risk / K, risk))


@cache
def _directions(N: int) -> Floats:
    """`DRAWS` unit vectors in the space of N runs, in directions that are all as likely."""
    drawn = np.random.default_rng(0).standard_normal((DRAWS, N))
    result: Floats = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return result


def _common_steps(runs: Sequence[Run], read: ReadEach, name: str, last: int) -> list[int]:
    """The last steps that all the runs have a value of, so that none is compared later."""
    steps_of_runs = []
    for run in runs:
        curve = read(run).get(name, {})
        steps_of_runs.append({step for step in curve if 0 < step <= last})
    steps = sorted(set.intersection(*steps_of_runs))
    # A validation is of many samples, and a step of training of few.
    count = 1 if read is TESTED else SMOOTHED_STEPS
    return steps[-count:]


def _ends(arm: RunsOfArm, read: ReadEach, name: str, steps: Sequence[int]) -> list[float]:
    """One number of each run; none if a run has no such number."""
    means = []
    for run in arm.runs:
        curve = read(run)[name]
        # The sum of the values may be more than a float holds, and that of their parts is not.
        means.append(math.fsum(curve[step] / len(steps) for step in steps))
    if any(math.isnan(mean) for mean in means):
        return []
    return means


def _samples(
    arm: RunsOfArm, other: RunsOfArm, values: Sequence[float], others: Sequence[float]
) -> list[Floats]:
    """The differences of runs with the same seed and rows if all have such a partner.

    Args:
        values, others: one number of each run of `arm` and of `other`, in their order.
    """
    mine = np.array(values)
    theirs = np.array(others)
    rows = [_rows_of(run) for run in arm.runs]
    other_rows = [_rows_of(run) for run in other.runs]
    has_twice = len(set(rows)) < len(rows) or len(set(other_rows)) < len(other_rows)
    are_pairs = set(rows) == set(other_rows) and not has_twice
    if not are_pairs or any(run.setting("data.seed") is None for run in arm.runs):
        return [mine, theirs]
    partners = [other_rows.index(rows_of_run) for rows_of_run in rows]
    return [mine - theirs[partners]]


def _rows_of(run: Run) -> tuple[str, ...]:
    """What decides which rows a run trains on, and in which order."""
    return tuple(str(run.setting(key)) for key in ("data.seed", *SAME_ROWS))
