"""Pictures. Draws only: what is drawn comes from `report/charts.py`.

Colours are Okabe and Ito's (the last three moved for contrast), and each line has a style and a
marker of its own, so that lines are told apart by colour-blind people and in print.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

LIGHT = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#000000", "#B8860B")
DARK = ("#56B4E9", "#E69F00", "#2BC59A", "#E39CC6", "#FFFFFF", "#F0E442")
STYLES = ("-", (0, (5, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (1, 1.2)), (0, (9, 2)), (0, (2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Line:
    """One curve; `low` and `high` are the edges of a band around it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    behind: Sequence[float] = ()  # the same curve unsmoothed, drawn faintly
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


@dataclass(frozen=True)
class _Theme:
    ink: str
    quiet: str
    background: str
    colours: Sequence[str]


THEMES = {
    "light": _Theme("#1f2328", "#d0d5db", "#ffffff", LIGHT),
    "dark": _Theme("#e6e8eb", "#3d444d", "#1b1f24", DARK),
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
    with mpl.rc_context(_style(look)):
        legends = max(_legend_shape(panel)[0] for panel in panels)
        figure = Figure(
            figsize=(4.8 * len(panels), 3.3 + 0.22 * legends),
            layout="constrained",
            facecolor=look.background,
        )
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for panel, where in zip(panels, axes, strict=True):
            _draw_panel(panel, where, look)
        if title:
            figure.suptitle(title)
        metadata = {"Date": None} if format == "svg" else None
        transparent = format == "svg"
        figure.savefig(target, format=format, dpi=200, metadata=metadata, transparent=transparent)


def _style(look: _Theme) -> dict[Any, Any]:
    return {
        "font.size": 11,
        "text.color": look.ink,
        "axes.labelcolor": look.ink,
        "axes.edgecolor": look.quiet,
        "xtick.labelcolor": look.ink,
        "ytick.labelcolor": look.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 12,
        "svg.hashsalt": "verl-gdpo",  # the same drawing is the same file
    }


def _draw_panel(panel: Panel, axes: Any, look: _Theme) -> None:
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7, min_n_ticks=1))
    axes.tick_params(length=3, color=look.quiet)
    axes.grid(color=look.quiet, linewidth=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    for line in panel.lines:
        _draw_line(line, axes, look)
    if panel.ylim:
        axes.set_ylim(panel.ylim)
    if axes.get_ylim()[0] < 0 < axes.get_ylim()[1]:
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
    axes.set_title(panel.title, loc="left", fontweight="bold", pad=12 + 15 * rows)


def _labels(panel: Panel) -> list[str]:
    """One for each line, and one that all markers share."""
    return list(dict.fromkeys(line.label for line in panel.lines))


def _legend_shape(panel: Panel) -> tuple[int, int]:
    """Rows and columns: as many columns as long names leave room for."""
    labels = _labels(panel)
    columns = max(1, min(3, len(labels), 52 // (7 + max(map(len, labels), default=0))))
    return -(-len(labels) // columns), columns


def _handles(panel: Panel, axes: Any, look: _Theme) -> list[Line2D]:
    """Of the lines as they are drawn; the markers are hollow in each line's colour."""
    markers = {line.label for line in panel.lines if line.only_markers}
    drawn = [line for line in axes.get_lines() if line.get_label() in _labels(panel)]
    lines = [line for line in drawn if line.get_label() not in markers]
    hollow: dict[str, Any] = {"marker": "o", "linestyle": "", "markerfacecolor": "none"}
    return lines + [Line2D([], [], color=look.ink, label=m, **hollow) for m in sorted(markers)]


def _draw_line(line: Line, axes: Any, look: _Theme) -> None:
    number = line.look % len(look.colours)
    colour, marker = look.colours[number], MARKERS[number]
    if line.only_markers:
        # hollow, so that one shows through another at the same place
        fill = {"markerfacecolor": "none", "markeredgewidth": 1.6, "markersize": 7}
        axes.plot(line.x, line.y, marker, color=colour, label=line.label, zorder=4, **fill)
        return
    if len(line.low):
        axes.fill_between(line.x, line.low, line.high, color=colour, alpha=0.2, linewidth=0)
    if len(line.behind):
        axes.plot(line.x, line.behind, color=colour, alpha=0.45, linewidth=1)
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linestyle=STYLES[number],
        linewidth=2,
        marker=marker,
        markersize=5,
        markevery=max(1, len(line.x) // 8),
        label=line.label,
    )
