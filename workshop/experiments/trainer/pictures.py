"""The pictures of workshop/experiments/RESULTS.md. Draws only."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.experiments.differences import Difference
from workshop.experiments.trainer.compare import (
    MATTERS,
    MATTERS_2,
    NAMES,
    SETTINGS,
    bonferroni,
    difference,
    endpoints,
    holm,
    mean_of_all,
    seeds_of,
)
from workshop.looks import LOOK, STYLE

ENDPOINT_MARKERS = ("o", "s", "^", "D")


def draw(folder: Path) -> None:
    with mpl.rc_context(STYLE):
        first().savefig(folder / "endpoints.png", dpi=150)
        second().savefig(folder / "second.png", dpi=150)


def first() -> Figure:
    """Every comparison of the protocol in every endpoint; only the filled marks decide."""
    rows: dict[str, list[Difference | None]] = {}
    for (setting, rival), gain in bonferroni().items():
        others = [*endpoints(setting).values()][1:]
        rows[_label(setting, rival, SETTINGS[setting].title)] = [
            gain,
            *(difference(setting, rival, endpoint) if endpoint else None for endpoint in others),
        ]
    return _differences(rows, [*endpoints("20_to_1")], MATTERS, "95 % for all together")


def second() -> Figure:
    """The comparisons of the second edition: the reward that decides, and the mean of all."""
    rows = {
        _label(setting, rival, f"{SETTINGS[setting].title}, {SETTINGS[setting].primary}"): [
            gain,
            difference(setting, rival, mean_of_all),
        ]
        for (setting, rival), gain in holm().items()
    }
    names = ["the reward in the line", "mean of all rewards"]
    return _differences(rows, names, MATTERS_2, "at the level of Holm's test")


def _differences(
    rows: Mapping[str, Sequence[Difference | None]],
    names: Sequence[str],
    matters: float,
    level: str,
) -> Figure:
    """Rows of differences with their intervals; the first of each row decides."""
    figure = Figure(
        figsize=(9, 1.6 + (0.2 + 0.15 * len(names)) * len(rows)),
        layout="constrained",
        facecolor=LOOK.background,
    )
    axes = figure.subplots()
    for place, gains in enumerate(rows.values()):
        for k, (name, gain) in enumerate(zip(names, gains, strict=True)):
            if gain:
                up = 0.2 * (k - (len(names) - 1) / 2)
                _draw_difference(axes, place + up, gain, k, name if place == 0 else None)
    axes.axvspan(-matters, matters, color=LOOK.quiet, alpha=0.5, linewidth=0)
    axes.axvline(0, color=LOOK.ink, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [*rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for edge in range(1, len(rows)):
        axes.axhline(edge - 0.5, color=LOOK.quiet, linewidth=0.8)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, columnspacing=1)
    figure.supxlabel(
        "GDPO's share minus the other's, mean over training (0 is nothing, 1 is all)\n"
        f"filled: decides, {level}; empty: 95 % each; grey: too small to matter",
        size=11,
    )
    return figure


def _label(setting: str, rival: str, title: str) -> str:
    return f"{title}:\nminus {NAMES[rival]} ({len(seeds_of(setting))} seeds)"


def _draw_difference(axes: Axes, place: float, gain: Difference, k: int, name: str | None) -> None:
    colour = LOOK.colours[k]
    axes.errorbar(
        gain.mean,
        place,
        xerr=gain.half_width,
        fmt=ENDPOINT_MARKERS[k],
        color=colour,
        markerfacecolor=LOOK.background if k else colour,
        markersize=6,
        label=name,
    )
