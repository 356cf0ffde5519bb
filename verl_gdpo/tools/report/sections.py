"""What a section of the report is made of, and how the charts of all sections are put together."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_gdpo.run.folder import Metrics
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.runs import Curve, RunsOfArm, over_runs

Read = Callable[[Metrics], Curve]
ReadEach = Callable[[Metrics], Mapping[str, Curve]]

MAIN_ARM = "gdpo"
SMOOTHED_STEPS = 5
FEWEST_FOR_BAND = 5  # runs of an arm
SMOOTHED = f"mean of {SMOOTHED_STEPS} steps"


@dataclass(frozen=True)
class Chart:
    """One picture; `caption` says what it shows, in words and numbers."""

    name: str  # of its files
    panel: Panel
    caption: str


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns are words, the others numbers.

    wraps: the cells are sentences, which may have several lines.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int
    wraps: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with charts; `notes` say what could not be drawn, and where it would come from.

    A section whose title is a question has an `answer`, which is also on the first screen.
    """

    anchor: str
    title: str
    intro: str
    charts: Sequence[Chart]
    notes: Sequence[str] = ()
    answer: Sequence[str] = ()


def without_empty_charts(section: Section) -> Section:
    """The section with a sentence in the place of each chart that would show nothing."""
    said = {chart.name: _why_empty(chart.panel) for chart in section.charts}
    return replace(
        section,
        charts=[chart for chart in section.charts if not said[chart.name]],
        notes=[*section.notes, *filter(None, said.values())],
    )


def _why_empty(panel: Panel) -> str:
    values = [y for line in panel.lines for y in line.y if math.isfinite(y)]
    if not values:
        return f"{panel.title}: there is no finite number."
    is_share = panel.ylabel.startswith("share")
    return f"{panel.title}: 0 at every step." if is_share and not any(values) else ""


def of_each_arm(
    arms: Sequence[RunsOfArm], say: Callable[[RunsOfArm], str], otherwise: str
) -> list[str]:
    """What is said of each arm, with its name where there are several."""
    found = {arm.name: text for arm in arms if (text := say(arm))}
    if len(arms) == 1:
        return [*found.values()] or [otherwise]
    return [f"{name}: {text}" for name, text in found.items()] or [otherwise]


def recent(arm: RunsOfArm, read: Read) -> float:
    """The mean over the runs of the mean over their last steps; NaN where no run has it."""
    found = over_runs(arm, read, SMOOTHED_STEPS)
    return math.nan if found is None else found.mean[-1]


def one_of(read: ReadEach, name: str) -> Read:
    """The curve of one name, empty where there is none."""
    return lambda metrics: read(metrics).get(name, {})


def names(arms: Sequence[RunsOfArm], read: ReadEach) -> list[str]:
    """Every name that some run has, in the order of its first appearance."""
    found = [name for arm in arms for run in arm.runs for name in read(run.metrics)]
    return list(dict.fromkeys(found))


def looks(arms: Sequence[RunsOfArm]) -> list[int]:
    """A look for each arm: 0 for gdpo, or else for the first, and then in their order."""
    names = [arm.name for arm in arms]
    main = names.index(MAIN_ARM) if MAIN_ARM in names else 0
    return [0 if i == main else i + (i < main) for i in range(len(arms))]


def arm_lines(arms: Sequence[RunsOfArm], read: Read, smooth: int = 1) -> list[Line]:
    """The lines of each arm that has the quantity; an arm has the same look everywhere."""
    return [
        drawn
        for look, arm in zip(looks(arms), arms, strict=True)
        for drawn in lines_of(arm, read, arm.name, look, smooth)
    ]


def lines_of(arm: RunsOfArm, read: Read, label: str, look: int, smooth: int = 1) -> list[Line]:
    """A line with a band over the runs of an arm; a line for each of fewer than five runs.

    Quartiles of a few runs would say more than is known.
    """
    alone = [RunsOfArm(arm.name, [run]) for run in arm.runs]
    return [
        Line(
            label,
            found.steps,
            found.median,
            *found.edges,
            look=look,
        )
        for one in ([arm] if len(arm.runs) >= FEWEST_FOR_BAND else alone)
        if (found := over_runs(one, read, smooth))
    ]


def first_to_last(panel: Panel, digits: int = 2) -> str:
    """`gdpo 0.41 to 1.00, grpo 0.40 to 0.98`, of the lines of a panel."""
    return ", ".join(
        f"{drawn.label} {decimal(drawn.y[0], digits)} to {decimal(drawn.y[-1], digits)}"
        for drawn in panel.lines
        if not drawn.only_markers
    )


def decimal(value: float, digits: int = 2) -> str:
    """`-0.40`, and 0 without a sign."""
    return f"{round(value, digits) + 0.0:.{digits}f}"


def absent(
    arms: Sequence[RunsOfArm], reads: Mapping[str, Read | ReadEach], source: str
) -> list[str]:
    """What could not be drawn: which metrics, of which runs, and what writes them."""
    runs = [run for arm in arms for run in arm.runs]
    lacking: dict[tuple[str, ...], list[str]] = {}
    for what, read in reads.items():
        without = tuple(run.name for run in runs if not read(run.metrics))
        if without:
            lacking.setdefault(without, []).append(what)
    return [
        ("The metrics" if len(without) == len(runs) else f"The metrics of {', '.join(without)}")
        + f" hold no {', '.join(what)}: {source}."
        for without, what in lacking.items()
    ]
