"""The tables of the page: results, differences with intervals, and where configurations differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_gdpo.tools.report.intervals import CONFIDENCE, Difference, differences_of_arms
from verl_gdpo.tools.report.runs import (
    FEWEST_FOR_BAND,
    SMOOTHED_STEPS,
    TESTED,
    TRAINED,
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

LAST_STEP = "last step"  # one of ENDS
LAST_STEPS = f"last {SMOOTHED_STEPS} steps"
DIGITS_SHOWN = 4
# JavaScript writes other numbers with an exponent.
LEAST_WITHOUT_EXPONENT = 1e-6
MOST_WITHOUT_EXPONENT = 1e21
# Of differences in this range, three decimals say enough.
LEAST_WITH_DECIMALS = 0.1
MOST_WITH_DECIMALS = 1e6


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
    ends_of_arms = []
    for arm in arms:
        ends_of_arms.append([_ends_of(run.metrics, last) for run in arm.runs])
    has_several = any(len(arm.runs) > 1 for arm in arms)

    header = ["reward", "arm"]
    if has_several:
        header.append("runs")
    for end in ENDS:
        header.append(LAST_STEPS if end == LAST_STEP else end)

    rows = []
    for name in dict.fromkeys(names(arms, TRAINED) + names(arms, TESTED)):
        for arm, ends_of_runs in zip(arms, ends_of_arms, strict=True):
            row = [name, arm.name]
            if has_several:
                row.append(str(len(arm.runs)))
            row += _cells([ends_of_run.get(name, {}) for ends_of_run in ends_of_runs])
            rows.append(tuple(row))

    caption = f"Mean reward{ends_apart(arms)}; higher is better"
    if any(len(arm.runs) >= FEWEST_FOR_BAND for arm in arms):
        caption += "; of five runs and more the median and, in brackets, the inter-quartile range"
    if len(arms) > 1 and any(len(arm.runs) == 1 for arm in arms):
        caption += "; an arm of one run may differ by chance"
    return Table(caption, tuple(header), rows, labels=2)


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


def _cells(ends_of_runs: Sequence[Mapping[str, EndValue]]) -> list[str]:
    """A cell for each of `ENDS`, over the runs of an arm that have it."""
    cells = []
    for end in ENDS:
        values = [ends_of_run[end] for ends_of_run in ends_of_runs if end in ends_of_run]
        cells.append(_over_runs(values))
    return cells


def _over_runs(values: Sequence[EndValue]) -> str:
    """Each of a few runs, and the quartiles of more."""
    if not values:
        return NOTHING
    if len(values) < FEWEST_FOR_BAND:
        return ", ".join(_end_as_text(value) for value in values)
    low, median, high = np.quantile([end.value for end in values], [0.25, 0.5, 0.75])
    return f"{as_text(median)} ({as_text(low)} to {as_text(high)})"


def _end_as_text(end: EndValue) -> str:
    text = as_text(end.value)
    if end.other_step is not None:
        text += f" (step {end.other_step})"
    return text


def as_text(value: float) -> str:
    """Return a number with four digits, as `shown` of page.js writes it.

    >>> as_text(0.43750001), as_text(83.25), as_text(123456), as_text(2.5e-9)
    ('0.4375', '83.25', '123500', '2.5e-9')
    """
    if not math.isfinite(value):
        return "no number"
    rounded = float(f"{value:.{DIGITS_SHOWN}g}") + 0.0  # -0.0 becomes 0.0
    if rounded == 0 or LEAST_WITHOUT_EXPONENT <= abs(rounded) < MOST_WITHOUT_EXPONENT:
        return np.format_float_positional(rounded, trim="-")
    return np.format_float_scientific(rounded, trim="-", exp_digits=1)


def table_of_differences(arms: Sequence[RunsOfArm]) -> Table | None:
    """None where no two arms have several runs."""
    differences = differences_of_arms(arms)
    if not differences:
        return None
    caption = (
        f"Differences at the end, with intervals that hold for all {len(differences)} together in "
        f"{CONFIDENCE:.0%} of reports. They are of the last validation, or without one of the mean "
        f"of the last {SMOOTHED_STEPS} steps{ends_apart(arms)}"
    )
    header = ("reward", "arms", "difference", "interval", "runs are", "which is")
    rows = [_row_of(difference) for difference in differences]
    return Table(caption, header, rows, labels=2)


def _row_of(difference: Difference) -> tuple[str, ...]:
    value, low, high = _signed_alike([difference.value, difference.low, difference.high])
    return (
        difference.reward,
        f"{difference.arm} less {difference.other}",
        value,
        f"{low} to {high}",
        "paired by seed" if difference.is_paired else "independent",
        "a difference" if difference.is_claimed else "may be chance",
    )


def _signed_alike(values: Sequence[float]) -> list[str]:
    """Each of some numbers that belong together, with its sign.

    They have three decimals, or four digits where the decimals would show none of them.
    """
    largest = max(abs(value) for value in values)
    if largest == 0 or LEAST_WITH_DECIMALS <= largest < MOST_WITH_DECIMALS:
        return [f"{value:+.3f}" for value in values]
    texts = []
    for value in values:
        text = as_text(value)
        has_sign = text.startswith("-") or not math.isfinite(value)
        texts.append(text if has_sign else f"+{text}")
    return texts


def differing_keys(arms: Sequence[RunsOfArm]) -> Table | None:
    """Keys of the configuration in which the first runs of the arms differ; None without any.

    Seeds, names, folders and ports are no difference.
    """
    configured = [arm for arm in arms if arm.runs[0].config]
    settings_of_arms = [arm.runs[0].settings for arm in configured]
    keys: set[str] = set()
    for settings in settings_of_arms:
        keys.update(settings)

    rows = []
    for key in sorted(keys):
        values = [settings.get(key, "not there") for settings in settings_of_arms]
        if len(set(values)) > 1:
            rows.append((key, *values))
    if not rows:
        return None
    header = ("key", *(arm.name for arm in configured))
    return Table("Where the configurations differ", header, rows, len(header))
