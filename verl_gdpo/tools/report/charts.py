"""The charts of the page: which there are, of which metrics, and how many of their points."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
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
SHARE, CORRELATION, ZERO = (0.0, 1.0), (-1.0, 1.0), (0.0, 0.0)
# {how the topic of a finding begins: the chart that shows it, if the page has it}
SHOWN = {
    "ignored": "gdpo/<reward>/share",
    "constant": "gdpo/<reward>/varies",
    "untrained": "actor/grad_norm",
}

# {metric: (title, unit, what the axis shows at least)}; the first screen begins with the first
OF_TRAINING = {
    "actor/entropy": ("Entropy", "of a token", ZERO),
    "actor/grad_norm": ("Gradient norm", "", ZERO),
    "actor/kl_loss": ("KL to the reference policy", "", ZERO),
    "actor/ppo_kl": ("KL of one update", "", ZERO),
    "actor/pg_clipfrac": ("Clipped tokens", "share", SHARE),
    "critic/advantages/max": ("Largest advantage", "", ZERO),
    "response_length/mean": ("Response length", "mean tokens", ZERO),
    "response_length/clip_ratio": ("Responses as long as the longest", "share", SHARE),
    "gdpo/no_signal": ("Groups without a signal", "share of groups", SHARE),
}
# {statistic of each reward: the same}
OF_EACH_REWARD = {
    "share": ("How much of the update comes from each reward", f"share, {SMOOTHED}", SHARE),
    "correlation": ("Correlation of each reward with the advantage", SMOOTHED, CORRELATION),
    "varies": ("Groups in which a reward differs", f"share of groups, {SMOOTHED}", SHARE),
    "missing": ("Samples without a reward", f"share of samples, {SMOOTHED}", SHARE),
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
    training = list(_of_training(arms))
    room = max(0, FIRST_SCREEN - len(rewards))
    first = rewards + training[:room]
    rest = training[room:]
    each = partial(_of_each_reward, arms)
    all_sections = {
        "first": first,
        "drives": [*each("share"), *each("correlation")],
        "dead": [*each("varies"), *each("missing")],
        "more": rest,
    }
    numbers = count()
    return [
        Section(name, [replace(chart, id=f"chart-{next(numbers)}") for chart in charts])
        for name, charts in all_sections.items()
        if charts or name == "first"
    ]


def looks_of_arms(arms: Sequence[RunsOfArm]) -> dict[str, int]:
    """The look of each arm, by its name."""
    return looks_of({arm.name: _estimator_of(arm) for arm in arms})


def _estimator_of(arm: RunsOfArm) -> str:
    """The estimator by the arm's configuration, or by its name where there is none."""
    run = arm.runs[0]
    if run.setting("algorithm.gdpo.group_norm") == "summed":
        return arm.name  # neither of the two
    return str(run.setting("algorithm.adv_estimator") or arm.name)


def _rewards(arms: Sequence[RunsOfArm]) -> list[Chart]:
    """Each arm's training and its validation."""
    charts = []
    looks = looks_of_arms(arms)
    for name in dict.fromkeys([*names(arms, TRAINED), *names(arms, TESTED)]):
        lines: list[Line] = []
        for arm in arms:
            look = looks[arm.name]
            trained = partial(_curve_of, TRAINED, name)
            lines += lines_of(arm, trained, arm.name, look, SMOOTHED_STEPS)
            if validation := over_runs(arm, partial(_curve_of, TESTED, name)).get(""):
                of_arm = f"{arm.name}, validation"
                if len(arm.runs) > 1:
                    of_arm += ", median"
                lines.append(Line(of_arm, [*validation], [*validation.values()], look, "points"))
        charts += _chart(name, name, SMOOTHED, ZERO, lines)
    return charts


def _curve_of(read_each: ReadEach, name: str, run: Run) -> Curve:
    """The curve of one name, empty where there is none."""
    return read_each(run).get(name, {})


def _of_training(arms: Sequence[RunsOfArm]) -> Iterator[Chart]:
    """Those that are 0 at every step are left out."""
    looks = looks_of_arms(arms)
    for key, about in OF_TRAINING.items():
        lines: list[Line] = []
        for arm in arms:
            read = partial(_curve_of, CURVES, key)
            lines += lines_of(arm, read, arm.name, looks[arm.name])
        if any(value for line in lines for value in line.values):
            yield from _chart(key, *about, lines)


def _of_each_reward(arms: Sequence[RunsOfArm], statistic: str) -> Iterator[Chart]:
    """A chart of each arm with a line for each reward."""

    def read_each(run: Run) -> dict[str, Curve]:
        return of_each_reward(run.curves, statistic)

    title, unit, axis = OF_EACH_REWARD[statistic]
    for arm in arms:
        lines: list[Line] = []
        for number, name in enumerate(names([arm], read_each)):
            read = partial(_curve_of, read_each, name)
            of_one = list(lines_of(arm, read, name, free_look(number), SMOOTHED_STEPS))
            # in most runs, no sample lacks a reward
            if statistic != "missing" or any(any(line.values) for line in of_one):
                lines += of_one
        named = f"{arm.name}: {title}" if arms[1:] else title
        yield from _chart(f"gdpo/<reward>/{statistic}", named, unit, axis, lines)


def _chart(about: str, title: str, unit: str, axis: Axis, lines: list[Line]) -> list[Chart]:
    """The chart of some lines, if there is anything to see."""
    is_seen = any(math.isfinite(value) for line in lines for value in line.values)
    return [Chart(about, title, unit, axis, lines)] if is_seen else []


def lines_of(arm: RunsOfArm, read: Read, label: str, look: int, smooth: int = 1) -> Iterator[Line]:
    """A line with a band over the runs of an arm; a line for each of fewer than five runs.

    Quartiles of a few runs would say more than is known.
    """
    is_band = len(arm.runs) >= FEWEST_FOR_BAND
    if is_band:
        parts = [arm]
    else:
        parts = [RunsOfArm(arm.name, [run]) for run in arm.runs]
    for part in parts:
        name = label if is_band or len(arm.runs) == 1 else _named_run(label, part.runs[0])
        for edge, curve in over_runs(part, read, smooth).items():
            yield Line(name, [*curve], [*curve.values()], look, edge)


def _named_run(label: str, run: Run) -> str:
    """The label of one run's line; legends have little room, so that none says a name twice."""
    return run.name if run.name.startswith(label) else f"{label}, {run.name}"


def chart_of(finding: Finding, charts: Sequence[Chart]) -> Chart | None:
    """The chart that shows what a finding is about; the first one if none is of its own."""
    shown = SHOWN.get(finding.topic.partition(" ")[0], "")
    metric = next((name for name, limit in LIMITS.items() if limit.topic == finding.topic), shown)
    # of other findings, the topic names the reward, and this one names metrics
    text = f"{metric} {finding.what if finding.topic == 'no number' else finding.topic}"
    about = [chart for chart in charts if chart.about in text or (metric and metric in chart.about)]
    return max(about, key=lambda chart: len(chart.about), default=next(iter(charts), None))


def as_data(charts: Sequence[Chart], end: int) -> list[Mapping[str, Any]]:
    """The charts as JSON has them: lines thinned to `POINTS`, numbers rounded, gaps null.

    Args:
        end: the step of which legends have the numbers, until somebody points at another one.
    """
    return [
        {
            **{name: getattr(chart, name) for name in ("id", "title", "unit", "axis")},
            "end": end,
            "lines": [_line_data(line) for line in chart.lines],
        }
        for chart in charts
    ]


def _line_data(line: Line) -> dict[str, Any]:
    kept = thinned(line.values, POINTS)
    values = [line.values[i] for i in kept]
    return {
        **{name: getattr(line, name) for name in ("label", "look", "kind")},
        "x": [line.steps[i] for i in kept],
        "y": [float(f"{y:.{DIGITS}g}") if math.isfinite(y) else None for y in values],
    }


def thinned(values: Sequence[float], most: int) -> list[int]:
    """The places of at most `most` values: both ends, and of each stretch its extremes."""
    if len(values) <= most:
        return [*range(len(values))]
    of_line = np.array(values, dtype=float)
    low, high = np.nan_to_num(of_line, nan=np.inf), np.nan_to_num(of_line, nan=-np.inf)
    kept = {0, len(values) - 1}
    for places in np.array_split(np.arange(len(values)), (most - 2) // 2):
        kept |= {int(places[low[places].argmin()]), int(places[high[places].argmax()])}
    return sorted(kept)
