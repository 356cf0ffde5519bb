"""The tables of the page: results, differences with intervals, and where configurations differ.

An interval allows for chance and for the other comparisons: those of a report hold their true
differences together in `CONFIDENCE` of all reports. Each is Student's t. How wide it has to be
follows from the correlations of the comparisons: what correlates errs together, and needs less room
than what does not (the single-step max-t method of Westfall and Young, under normality). Below five
runs the correlations are not known, and the risk is split evenly (Bonferroni). Runs are compared in
pairs where both arms have the same seeds and the same rows, and as independent (Welch) where they
have not.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt
from scipy import stats

from verl_gdpo.algorithm.zero import NO_SIGNAL
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
    ends_apart,
    last_common_step,
    names,
    trailing_mean,
)
from verl_gdpo.tools.run_folder.folder import (
    ENDS,
    NOTHING,
    EndValue,
    Metrics,
    ends,
    training_rewards,
)

Floats = npt.NDArray[np.float64]

# of all intervals of a report together: five seeds an arm are few, so that 0.95 would miss a
# difference of two standard deviations in more than two of ten reports of two rewards
CONFIDENCE = 0.93
DRAWS = 20_000
LAST_STEP = "last step"  # one of ENDS
LAST_STEPS = f"last {SMOOTHED_STEPS} steps"
DIGITS_SHOWN = 4
SAME_ROWS = ("data.train_files", "data.train_batch_size", "actor_rollout_ref.rollout.n")


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns are words, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int


def results(arms: Sequence[RunsOfArm]) -> Table:
    """Each reward of each arm, at both ends of the training.

    The numbers are those in the legends of the charts: the end is a mean of the last steps.
    """
    last = last_common_step(arms)
    of_arms = [(arm, [_ends_of(run.metrics, last) for run in arm.runs]) for arm in arms]
    has_several = any(len(arm.runs) > 1 for arm in arms)
    rows = []
    for name in dict.fromkeys([*names(arms, TRAINED), *names(arms, TESTED)]):
        for arm, of_runs in of_arms:
            labels = [name, arm.name]
            if has_several:
                labels.append(str(len(arm.runs)))
            rows.append((*labels, *_cells([of_run.get(name, {}) for of_run in of_runs])))
    caption = f"Mean reward{ends_apart(arms)}; higher is better"
    if any(len(arm.runs) >= FEWEST_FOR_BAND for arm in arms):
        caption += "; of five runs and more the median and, in brackets, the inter-quartile range"
    if len(arms) > 1 and any(len(arm.runs) == 1 for arm in arms):
        caption += "; an arm of one run may differ by chance"
    columns = [LAST_STEPS if end == LAST_STEP else end for end in ENDS]
    labels = ["reward", "arm", "runs"] if has_several else ["reward", "arm"]
    return Table(caption, (*labels, *columns), rows, labels=2)


def _ends_of(metrics: Metrics, last: int) -> dict[str, dict[str, EndValue]]:
    """What `ends` returns of the metrics up to a step, with a mean in the place of the last step.

    Args:
        last: the last step that is read.
    """
    until = {step: values for step, values in metrics.items() if step <= last}
    values = ends(until)
    for name, curve in training_rewards(until).items():
        step = max(curve)
        mean = trailing_mean(curve, SMOOTHED_STEPS)[step]
        values[name][LAST_STEP] = replace(values[name][LAST_STEP], value=mean)
    return values


def _cells(of_runs: Sequence[Mapping[str, EndValue]]) -> list[str]:
    return [_over_runs([rewards[end] for rewards in of_runs if end in rewards]) for end in ENDS]


def _over_runs(values: Sequence[EndValue]) -> str:
    """Each of a few runs, and the quartiles of more."""
    if len(values) < FEWEST_FOR_BAND:
        return ", ".join(map(_end_as_text, values)) or NOTHING
    low, median, high = np.quantile([end.value for end in values], [0.25, 0.5, 0.75])
    return f"{as_text(median)} ({as_text(low)} to {as_text(high)})"


def _end_as_text(end: EndValue) -> str:
    place = "" if end.other_step is None else f" (step {end.other_step})"
    return as_text(end.value) + place


def as_text(value: float) -> str:
    """Return a number with four digits, as `shown` of page.js writes it.

    >>> as_text(0.43750001), as_text(83.25), as_text(123456)
    ('0.4375', '83.25', '123500')
    """
    if not math.isfinite(value):
        return "no number"
    rounded = float(f"{value:.{DIGITS_SHOWN}g}") + 0.0  # -0.0 becomes 0.0
    return np.format_float_positional(rounded, trim="-")


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

    @property
    def value(self) -> float:
        return float(self.samples[0].mean() - sum(map(np.mean, self.samples[1:])))

    @property
    def errors(self) -> Floats:
        """What each run adds to the error of `value`."""
        signs = (1, -1)
        return np.concatenate(
            [s * (x - x.mean()) / len(x) for s, x in zip(signs, self.samples, strict=False)]
        )

    @cached_property
    def half(self) -> float:
        """Half of the width of the interval."""
        parts = [float(np.var(x, ddof=1)) / len(x) for x in self.samples]
        below = [p**2 / (len(x) - 1) for p, x in zip(parts, self.samples, strict=True)]
        freedom = sum(parts) ** 2 / sum(below) if sum(below) else 1.0
        return math.sqrt(sum(parts)) * float(stats.t.isf(self.risk / 2, freedom))

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
    differences = [
        Difference(name, main.name, other.name, _samples(main, other, values, others))
        for other in several
        if other is not main
        for name, read in _rewards(arms)
        if (steps := _common_steps([*main.runs, *other.runs], read, name, last))
        and (values := _ends(main, read, name, steps))
        and (others := _ends(other, read, name, steps))
    ]
    risks = _risks(differences)
    return [replace(each, risk=risk) for each, risk in zip(differences, risks, strict=True)]


def _risks(differences: Sequence[Difference]) -> list[float]:
    """The chance to err that each comparison may have, for 1 - `CONFIDENCE` in all together."""
    families: dict[str, list[int]] = {}  # compared over the same runs
    for number, difference in enumerate(differences):
        families.setdefault("" if difference.is_paired else difference.other, []).append(number)
    risks = [math.nan] * len(differences)
    for members in families.values():
        errors_NK = np.stack([differences[number].errors for number in members], axis=1)
        fewest = min(len(x) for number in members for x in differences[number].samples)
        risk = (1 - CONFIDENCE) * len(members) / len(differences)
        each = risk_of_each(errors_NK, risk) if fewest >= FEWEST_FOR_BAND else risk / len(members)
        for number in members:
            risks[number] = each
    return risks


def risk_of_each(errors_NK: Floats, risk: float) -> float:
    """The risk of one of K comparisons of N runs, for which some of them errs with `risk`.

    Errors that are normal and have the correlations of `errors_NK` are drawn many times, for the
    largest |t| of each draw. The result is at least `risk` / K, and `risk` where all err together.
    """
    N, K = errors_NK.shape
    lengths_K = np.linalg.norm(errors_NK, axis=0)
    # t is sqrt(N - 1) / tan of the angle between the errors and a direction drawn at random
    cosines = np.abs(_directions(N) @ (errors_NK / np.where(lengths_K > 0, lengths_K, 1.0)))
    cosine = float(np.quantile(cosines.max(axis=1), 1 - risk))
    t = math.sqrt((N - 1) / (1 - cosine**2)) * cosine
    return float(np.clip(2 * stats.t.sf(t, N - 1), risk / K, risk))


@cache
def _directions(N: int) -> Floats:
    drawn = np.random.default_rng(0).standard_normal((DRAWS, N))
    result: Floats = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return result


def table_of_differences(arms: Sequence[RunsOfArm]) -> Table | None:
    """None where no two arms have several runs."""
    differences = differences_of_arms(arms)
    if not differences:
        return None
    rows = [
        (
            difference.reward,
            f"{difference.arm} less {difference.other}",
            f"{difference.value:+.3f}",
            f"{difference.low:+.3f} to {difference.high:+.3f}",
            "paired by seed" if difference.is_paired else "independent",
            "a difference" if difference.is_claimed else "may be chance",
        )
        for difference in differences
    ]
    caption = (
        f"Differences at the end, with intervals that hold for all {len(differences)} together in "
        f"{CONFIDENCE:.0%} of reports. They are of the last validation, or without one of the mean "
        f"of the last {SMOOTHED_STEPS} steps{ends_apart(arms)}"
    )
    header = ("reward", "arms", "difference", "interval", "runs are", "which is")
    return Table(caption, header, rows, labels=2)


def _rewards(arms: Sequence[RunsOfArm]) -> list[tuple[str, ReadEach]]:
    """Each reward with what is read of it: validation where there is one."""
    measured = names(arms, TESTED)
    trained = [name for name in names(arms, TRAINED) if name not in measured]
    return [
        *((name, TESTED) for name in measured),
        *((name, TRAINED) for name in trained),
    ]


def _common_steps(runs: Sequence[Run], read: ReadEach, name: str, last: int) -> list[int]:
    """The last steps that all the runs have a value of, so that none is compared later."""
    of_each = [{s for s in read(run).get(name, {}) if 0 < s <= last} for run in runs]
    steps = sorted(set.intersection(*of_each))
    return steps[-(1 if read is TESTED else SMOOTHED_STEPS) :]


def _ends(arm: RunsOfArm, read: ReadEach, name: str, steps: Sequence[int]) -> list[float]:
    """One number of each run; none if a run has no such number."""
    curves = [read(run)[name] for run in arm.runs]
    means = [statistics.fmean(curve[step] for step in steps) for curve in curves]
    return [] if any(map(math.isnan, means)) else means


def _samples(
    arm: RunsOfArm, other: RunsOfArm, values: Sequence[float], others: Sequence[float]
) -> list[Floats]:
    """The differences of runs with the same seed and rows if all have such a partner."""
    mine, theirs = np.array(values), np.array(others)
    number_of = {_rows_of(run): number for number, run in enumerate(other.runs)}
    rows = [_rows_of(run) for run in arm.runs]
    are_pairs = {*rows} == {*number_of} and len(rows) == len({*rows}) == len(other.runs)
    if not are_pairs or any(run.setting("data.seed") is None for run in arm.runs):
        return [mine, theirs]
    return [mine - theirs[[number_of[key] for key in rows]]]


def _rows_of(run: Run) -> tuple[str, ...]:
    return tuple(str(run.setting(key)) for key in ("data.seed", *SAME_ROWS))


def differences(arms: Sequence[RunsOfArm]) -> Table | None:
    """Keys of the configuration in which the first runs of the arms differ; None without any.

    Seeds, names, folders and ports are no difference.
    """
    settings = [arm.runs[0].settings for arm in arms if arm.runs[0].config]
    keys = sorted({key for of_run in settings for key in of_run})
    values = {key: [of_run.get(key, "not there") for of_run in settings] for key in keys}
    rows = [(key, *of_key) for key, of_key in values.items() if len({*of_key}) > 1]
    header = ("key", *(arm.name for arm in arms if arm.runs[0].config))
    return Table("Where the configurations differ", header, rows, len(header)) if rows else None
