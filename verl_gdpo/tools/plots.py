"""Pictures. Draws only: what is drawn comes from `report/charts.py`.

A look is a colour, a line style and a marker. Look 0 is a solid line. Each colour also has a
lightness of its own, so that lines are told apart in grey and by colour-blind people. After the
last colour the first comes again, with another line style and marker.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

# CIE lightness 24 60 37 0 49 12, and 79 46 68 100 57 90
LIGHT = ("#003C65", "#E27101", "#A01E71", "#000000", "#008559", "#34005A")
DARK = ("#9DC6FF", "#AD5500", "#FB79C3", "#FFFFFF", "#079C69", "#F2DAFF")
STYLES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2)), (0, (9, 2)), (0, (2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
TITLE_WIDTH = 38  # characters in a line
LONG = 200  # steps, above which lines are thin


@dataclass(frozen=True)
class Line:
    """One curve; `low` and `high` are the edges of a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    behind: Sequence[float] = ()  # the same curve unsmoothed, drawn thin
    look: int = 0  # the same number has the same colour, style and marker everywhere
    only_markers: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    ylim: tuple[float, float] | None = None
    bounds: tuple[float, float] | None = None  # the lowest and the highest value that y can have


@dataclass(frozen=True)
class Theme:
    ink: str
    quiet: str
    background: str
    colours: Sequence[str]


THEMES = {
    "light": Theme("#1f2328", "#d0d5db", "#ffffff", LIGHT),
    "dark": Theme("#e6e8eb", "#3d444d", "#1b1f24", DARK),
}


def draw(
    panels: Sequence[Panel],
    target: Path | BinaryIO,
    *,
    format: Literal["png", "svg"] = "png",
    theme: Literal["light", "dark"] = "light",
    title: str = "",
) -> None:
    """Write the panels side by side to `target`; an SVG has no background of its own."""
    look = THEMES[theme]
    with mpl.rc_context(style(look)):
        metadata = {"Date": None} if format == "svg" else None
        figure_of(panels, look, title).savefig(
            target, format=format, dpi=200, metadata=metadata, transparent=format == "svg"
        )


def figure_of(panels: Sequence[Panel], look: Theme, title: str = "") -> Figure:
    """The panels side by side."""
    above = max(_legend_shape(panel)[0] + _title_of(panel).count("\n") for panel in panels)
    figure = Figure(
        figsize=(4.8 * len(panels), 3.3 + 0.22 * above),
        layout="constrained",
        facecolor=look.background,
    )
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for panel, where in zip(panels, axes, strict=True):
        _draw_panel(panel, where, look)
    if title:
        figure.suptitle(title)
    return figure


def style(look: Theme) -> dict[Any, Any]:
    return {
        "font.size": 11,
        "text.color": look.ink,
        "axes.facecolor": look.background,
        "axes.labelcolor": look.ink,
        "axes.edgecolor": look.quiet,
        "xtick.labelcolor": look.ink,
        "ytick.labelcolor": look.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 12,
        "svg.hashsalt": "verl-gdpo",  # the same drawing is the same file
    }


def _draw_panel(panel: Panel, axes: Any, look: Theme) -> None:
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.tick_params(length=3, color=look.quiet)
    axes.grid(color=look.quiet, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    for line in panel.lines:
        _draw_line(line, axes, look)
    if panel.ylim:
        axes.set_ylim(panel.ylim)
    if panel.bounds:
        _draw_bounds(*panel.bounds, axes, look)
    elif axes.get_ylim()[0] < 0 < axes.get_ylim()[1]:
        axes.axhline(0, color=look.ink, linewidth=0.8, alpha=0.5)
    rows, columns = _legend_shape(panel)
    # above the axes a title and a legend cover no curve
    axes.legend(
        handles=_handles(panel, axes, look),
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        frameon=False,
        fontsize=10,
        borderaxespad=0.2,
        handlelength=3.2,
        columnspacing=1.4,
    )
    axes.set_title(_title_of(panel), loc="left", fontweight="bold", pad=12 + 15 * rows)


def _title_of(panel: Panel) -> str:
    return textwrap.fill(panel.title, TITLE_WIDTH)


def _labels(panel: Panel) -> list[str]:
    """One for each line, and one that all markers share."""
    return list(dict.fromkeys(line.label for line in panel.lines))


def _legend_shape(panel: Panel) -> tuple[int, int]:
    """Rows and columns: as many columns as long names leave room for."""
    labels = _labels(panel)
    columns = max(1, min(3, len(labels), 54 // (7 + max(map(len, labels), default=0))))
    return -(-len(labels) // columns), columns


def _handles(panel: Panel, axes: Any, look: Theme) -> list[Any]:
    """Of the lines as they are drawn; the markers are hollow in each line's colour."""
    markers = {line.label for line in panel.lines if line.only_markers}
    # several lines may have one label, and the first stands for them
    by_label = {line.get_label(): line for line in reversed(axes.get_lines())}
    drawn = [by_label[label] for label in _labels(panel) if label in by_label]
    lines = [line for line in drawn if line.get_label() not in markers]
    hollow: dict[str, Any] = {"marker": "o", "linestyle": "", "markerfacecolor": "none"}
    return lines + [Line2D([], [], color=look.ink, label=m, **hollow) for m in sorted(markers)]


def _draw_bounds(low: float, high: float, axes: Any, look: Theme) -> None:
    """Thin lines; their names are outside of them, where no value can be."""
    room = 0.14 * (high - low)
    axes.set_ylim(low - room, high + room)
    for value, name, away in ((low, "lowest", -1), (high, "highest", 1)):
        axes.axhline(value, color=look.ink, linewidth=0.8)
        axes.annotate(
            f"{name} possible: {value:g}".replace("-", "\N{MINUS SIGN}"),
            (0.99, value),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, 5 * away),
            textcoords="offset points",
            ha="right",
            va="bottom" if away > 0 else "top",
            fontsize=9,
        )


def _draw_line(line: Line, axes: Any, look: Theme) -> None:
    again, number = divmod(line.look, len(look.colours))
    colour, style = look.colours[number], STYLES[(number + again) % len(STYLES)]
    marker = MARKERS[(number + 3 * again) % len(MARKERS)]  # of no line with the same style
    if line.only_markers:
        # hollow, so that one shows through another at the same place
        fill = {"markerfacecolor": "none", "markeredgewidth": 1.6, "markersize": 7}
        axes.plot(line.x, line.y, marker, color=colour, label=line.label, zorder=4, **fill)
        return
    if len(line.low):
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    is_long = len(line.x) > LONG
    if len(line.behind):
        axes.plot(line.x, line.behind, color=colour, alpha=0.45, linewidth=0.5 if is_long else 1)
    # a solid line above a dashed one would hide it
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linestyle=style,
        linewidth=1.2 if is_long else 2,
        marker=marker,
        markersize=5,
        markevery=max(1, len(line.x) // 8),
        label=line.label,
        zorder=2 + number / 10,
    )
