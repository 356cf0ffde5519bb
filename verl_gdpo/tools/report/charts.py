"""The charts of the page: which there are, of which metrics, and how many of their points."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.tools.report.colours import free_look, looks_of
from verl_gdpo.tools.report.runs import (
    FEWEST_FOR_BAND,
    SMOOTHED_STEPS,
    TESTED,
    TRAINED,
    Curve,
    Read,
    ReadEach,
    Run,
    RunsOfArm,
    names,
    over_runs,
)
from verl_gdpo.tools.run_folder.finding_rules import LIMITS
from verl_gdpo.tools.run_folder.findings import Finding
from verl_gdpo.tools.run_folder.folder import of_each_reward

CURVES: ReadEach = attrgetter("curves")
Axis = tuple[float, float]

POINTS = 500  # of a line, with about 12 bytes for each
DIGITS = 5
FIRST_SCREEN = 4  # charts, or more where there are more rewards
SMOOTHED = f"{SMOOTHED_STEPS}-step mean"
SHARE = (0.0, 1.0)
CORRELATION = (-1.0, 1.0)
ZERO = (0.0, 0.0)
# {first word of the topic of a finding: the chart that shows it, if the page has it}
SHOWN = {
    "ignored": "gdpo/<reward>/share",
    "constant": "gdpo/<reward>/varies",
    "untrained": "actor/grad_norm",
}


class Labels(NamedTuple):
    """What a chart says around its lines."""

    title: str
    unit: str
    axis: Axis  # what it shows at least


# {metric: its chart}. Where the first screen has room, it takes them from the beginning.
OF_TRAINING = {
    "actor/entropy": Labels("Entropy", "of a token", ZERO),
    "actor/grad_norm": Labels("Gradient norm", "", ZERO),
    "actor/kl_loss": Labels("KL to the reference policy", "", ZERO),
    "actor/ppo_kl": Labels("KL of one update", "", ZERO),
    "actor/pg_clipfrac": Labels("Clipped tokens", "share", SHARE),
    "critic/advantages/max": Labels("Largest advantage", "", ZERO),
    "response_length/mean": Labels("Response length", "mean tokens", ZERO),
    "response_length/clip_ratio": Labels("Responses as long as the longest", "share", SHARE),
    "gdpo/no_signal": Labels("Groups without a signal", "share of groups", SHARE),
}
# {statistic of each reward: its chart}
OF_EACH_REWARD = {
    "share": Labels("How much of the update comes from each reward", f"share, {SMOOTHED}", SHARE),
    "correlation": Labels("Correlation of each reward with the advantage", SMOOTHED, CORRELATION),
    "varies": Labels("Groups in which a reward differs", f"share of groups, {SMOOTHED}", SHARE),
    "missing": Labels("Samples without a reward", f"share of samples, {SMOOTHED}", SHARE),
}


@dataclass(frozen=True)
class Line:
    """One curve; a value that is NaN is a gap."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    look: int = 0  # see colours.py
    kind: str = ""  # "points"; "low" and "high" of a band


@dataclass(frozen=True)
class Chart:
    """One picture, of a metric or of a reward."""

    about: str
    title: str
    unit: str
    axis: Axis  # what it shows at least
    lines: Sequence[Line]
    id: str = ""  # in the page


class Section(NamedTuple):
    """Charts under a heading of the template."""

    name: str
    charts: Sequence[Chart]


def sections(arms: Sequence[RunsOfArm]) -> list[Section]:
    """The sections that have a chart, and the first screen, which is the first one.

    It has all rewards, since the one that drives the update may be any of them.
    """
    rewards = _rewards(arms)
    training = _of_training(arms)
    room = max(0, FIRST_SCREEN - len(rewards))
    charts_of = {
        "first": rewards + training[:room],
        "drives": _of_each_reward(arms, "share") + _of_each_reward(arms, "correlation"),
        "dead": _of_each_reward(arms, "varies") + _of_each_reward(arms, "missing"),
        "more": training[room:],
    }

    found = []
    number = 0
    for name, charts in charts_of.items():
        if not charts and name != "first":
            continue
        numbered = []
        for chart in charts:
            numbered.append(replace(chart, id=f"chart-{number}"))
            number += 1
        found.append(Section(name, numbered))
    return found


def looks_of_arms(arms: Sequence[RunsOfArm]) -> dict[str, int]:
    """The look of each arm, by its name."""
    return looks_of({arm.name: _estimator_of(arm) for arm in arms})


def _estimator_of(arm: RunsOfArm) -> str:
    """The estimator by the arm's configuration, or by its name where there is none."""
    run = arm.runs[0]
    if run.setting("algorithm.gdpo.group_norm") == "summed":
        # Neither GDPO nor GRPO, whatever the configuration calls it.
        return arm.name
    return str(run.setting("algorithm.adv_estimator") or arm.name)


def _rewards(arms: Sequence[RunsOfArm]) -> list[Chart]:
    """A chart of each reward, with each arm's training and its validation."""
    looks = looks_of_arms(arms)
    charts = []
    for name in dict.fromkeys(names(arms, TRAINED) + names(arms, TESTED)):
        lines: list[Line] = []
        for arm in arms:
            look = looks[arm.name]
            lines += lines_of(arm, _reader_of(TRAINED, name), arm.name, look, SMOOTHED_STEPS)
            lines += _validation(arm, name, look)
        if _is_seen(lines):
            charts.append(Chart(name, name, SMOOTHED, ZERO, lines))
    return charts


def _validation(arm: RunsOfArm, name: str, look: int) -> list[Line]:
    """The line of an arm's validation, if there was one."""
    median = over_runs(arm, _reader_of(TESTED, name)).get("")
    if not median:
        return []
    label = f"{arm.name}, validation"
    if len(arm.runs) > 1:
        label += ", median"
    return [Line(label, list(median), list(median.values()), look, "points")]


def _reader_of(read_each: ReadEach, name: str) -> Read:
    """A function that returns the curve of one name in a run, empty where there is none."""

    def read(run: Run) -> Curve:
        return read_each(run).get(name, {})

    return read


def _of_training(arms: Sequence[RunsOfArm]) -> list[Chart]:
    """The charts of `OF_TRAINING`, without those that are 0 at every step."""
    looks = looks_of_arms(arms)
    charts = []
    for key, labels in OF_TRAINING.items():
        lines: list[Line] = []
        for arm in arms:
            lines += lines_of(arm, _reader_of(CURVES, key), arm.name, looks[arm.name])
        if _is_seen(lines) and not _is_0(lines):
            charts.append(Chart(key, labels.title, labels.unit, labels.axis, lines))
    return charts


def _of_each_reward(arms: Sequence[RunsOfArm], statistic: str) -> list[Chart]:
    """A chart of each arm with a line for each reward."""

    def read_each(run: Run) -> dict[str, Curve]:
        return of_each_reward(run.curves, statistic)

    labels = OF_EACH_REWARD[statistic]
    charts = []
    for arm in arms:
        lines: list[Line] = []
        for number, name in enumerate(names([arm], read_each)):
            read = _reader_of(read_each, name)
            of_reward = list(lines_of(arm, read, name, free_look(number), SMOOTHED_STEPS))
            # In most runs no sample lacks a reward, and lines at 0 would hide the others.
            if statistic == "missing" and _is_0(of_reward):
                continue
            lines += of_reward
        title = labels.title
        if len(arms) > 1:
            title = f"{arm.name}: {title}"
        if _is_seen(lines):
            about = f"gdpo/<reward>/{statistic}"
            charts.append(Chart(about, title, labels.unit, labels.axis, lines))
    return charts


def _is_seen(lines: Sequence[Line]) -> bool:
    """Whether a line has a point; a chart of gaps alone is left out."""
    return any(math.isfinite(value) for line in lines for value in line.values)


def _is_0(lines: Sequence[Line]) -> bool:
    """Whether every value is 0; a line with a gap has one that is not."""
    return not any(value for line in lines for value in line.values)


def lines_of(arm: RunsOfArm, read: Read, label: str, look: int, smooth: int = 1) -> Iterator[Line]:
    """A line with a band over the runs of an arm; a line for each of fewer than five runs.

    Quartiles of a few runs would say more than is known.

    Args:
        read: the curve of a run.
        smooth: steps of which each point is the mean.
    """
    if len(arm.runs) == 1 or len(arm.runs) >= FEWEST_FOR_BAND:
        yield from _line_and_band(arm, read, label, look, smooth)
        return
    for run in arm.runs:
        alone = RunsOfArm(arm.name, [run])
        # Legends have little room, so that none says the name of an arm twice.
        of_run = f"{label}, {run.name}"
        if label == arm.name and run.name.startswith(label):
            of_run = run.name
        yield from _line_and_band(alone, read, of_run, look, smooth)


def _line_and_band(
    arm: RunsOfArm, read: Read, label: str, look: int, smooth: int
) -> Iterator[Line]:
    """The median over all runs of an arm, and of several its quartiles."""
    for edge, curve in over_runs(arm, read, smooth).items():
        yield Line(label, list(curve), list(curve.values()), look, edge)


def chart_of(finding: Finding, charts: Sequence[Chart]) -> Chart | None:
    """The chart that shows what a finding is about; the first one if none is of its own."""
    metric = _metric_of(finding)
    # A topic may name a reward. That of numbers which are none does not, and its message does.
    subject = finding.what if finding.topic == "no number" else finding.topic
    text = f"{metric} {subject}"
    candidates = []
    for chart in charts:
        is_named = chart.about in text
        is_of_metric = metric != "" and metric in chart.about
        if is_named or is_of_metric:
            candidates.append(chart)
    if candidates:
        # The longest name: a text with `correct (a)` has `correct` too.
        return max(candidates, key=lambda chart: len(chart.about))
    return charts[0] if charts else None


def _metric_of(finding: Finding) -> str:
    """The metric, or the kind of chart, of a finding's topic; "" where it has none."""
    for name, limit in LIMITS.items():
        if limit.topic == finding.topic:
            return name
    first_word = finding.topic.partition(" ")[0]
    return SHOWN.get(first_word, "")


def as_data(charts: Sequence[Chart], end: int) -> list[Mapping[str, Any]]:
    """The charts as JSON has them: lines thinned to `POINTS`, numbers rounded, gaps null.

    Args:
        end: the step of which legends have the numbers, until somebody points at another one.
    """
    data: list[Mapping[str, Any]] = []
    for chart in charts:
        data.append(
            {
                "id": chart.id,
                "title": chart.title,
                "unit": chart.unit,
                "axis": chart.axis,
                "end": end,
                "lines": [_line_data(line) for line in chart.lines],
            }
        )
    return data


def _line_data(line: Line) -> dict[str, Any]:
    kept = thinned(line.values, POINTS)
    return {
        "label": line.label,
        "look": line.look,
        "kind": line.kind,
        "x": [line.steps[place] for place in kept],
        "y": [_rounded(line.values[place]) for place in kept],
    }


def _rounded(value: float) -> float | None:
    """The value with `DIGITS` digits, or None for a gap, which JSON has no number for."""
    if not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def thinned(values: Sequence[float], most: int) -> list[int]:
    """The places of at most `most` values: both ends, and of each stretch its extremes."""
    if len(values) <= most:
        return list(range(len(values)))
    of_line = np.array(values, dtype=float)
    # A gap is neither the lowest nor the highest value.
    low = np.nan_to_num(of_line, nan=np.inf)
    high = np.nan_to_num(of_line, nan=-np.inf)
    kept = {0, len(values) - 1}
    # Each stretch gives two places, beside the two ends.
    for stretch in np.array_split(np.arange(len(values)), (most - 2) // 2):
        kept.add(int(stretch[low[stretch].argmin()]))
        kept.add(int(stretch[high[stretch].argmax()]))
    return sorted(kept)
