"""The pictures of docs/in_verls_trainer.md. Draws only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.experiments.trainer.compare import (
    COMPARISONS_2,
    ENDPOINTS,
    LEVEL,
    MATTERS,
    MATTERS_2,
    Difference,
    Results,
    difference,
    holm,
    in_order,
    mean_of_all,
)
from workshop.experiments.trainer.settings import PROTOCOL, SETTINGS, Run
from workshop.looks import LOOK, style

PICTURES = Path(__file__).parents[3] / "docs" / "in_verls_trainer"
NAMES = {"gdpo": "GDPO", "grpo": "GRPO", "grpo_rescaled": "rescaled GRPO"}
# what the small and the large reward are, by setting
OF_REWARD = {
    "small": {"": " (answer)", "by_prompt": "", "tool_rl": " (format)"},
    "large": {"": " (format)", "by_prompt": "", "tool_rl": " (correctness)"},
}
STYLES = {"gdpo": "-", "grpo": "--", "grpo_rescaled": ":"}
COLOURS = dict(zip(NAMES, LOOK.colours, strict=False))


ENDPOINT_MARKERS = ("o", "s", "^", "D")


def draw(found: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style(LOOK)):
        endpoints(found).savefig(folder / "endpoints.png", dpi=150)
        second(found).savefig(folder / "second.png", dpi=150)
        curves(found).savefig(folder / "curves.png", dpi=150)


def endpoints(found: Results) -> Figure:
    """Every comparison of the protocol in every endpoint; only the filled marks decide."""
    rows = {
        _label(found, row, SETTINGS[row[0]].title): [
            difference(found, *row, endpoint, LEVEL if k == 0 else 0.95)
            for k, endpoint in enumerate(ENDPOINTS.values())
        ]
        for row in in_order(found)
    }
    return _differences(rows, [*ENDPOINTS], MATTERS, "95 % for all together")


def second(found: Results) -> Figure:
    """The comparisons of the second edition: the reward that decides, and the mean of all."""
    gains = holm(found)
    rows = {
        _label(found, row, f"{SETTINGS[row[0]].title}, {SETTINGS[row[0]].primary}"): [
            gains[row],
            difference(found, *row, mean_of_all, level=0.95),
        ]
        for row in COMPARISONS_2
        if gains[row].of_seed
    }
    names = ["the reward in the line", "mean of all rewards"]
    return _differences(rows, names, MATTERS_2, "at the level of Holm's test")


def _differences(
    rows: Mapping[str, Sequence[Difference]], names: Sequence[str], matters: float, level: str
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
            if gain.of_seed:
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


def _label(found: Results, row: tuple[str, str, str], title: str) -> str:
    gain = difference(found, *row)
    done, planned = len(gain.of_seed), len(gain.seeds)
    seeds = f"{done} seeds" if done == planned else f"{done} of {planned} seeds"
    return f"{title}:\nminus {NAMES[row[2]]} ({seeds})"


def _draw_difference(axes: Axes, place: float, gain: Difference, k: int, name: str | None) -> None:
    colour = LOOK.colours[k]
    is_claimed = k == 0 and gain.verdict != "not complete"
    axes.errorbar(
        gain.mean,
        place,
        xerr=gain.half_width if len(gain.of_seed) > 1 else 0,
        fmt=ENDPOINT_MARKERS[k],
        color=colour,
        markerfacecolor=colour if is_claimed else LOOK.background,
        markersize=6,
        label=name,
    )


def curves(found: Results) -> Figure:
    """Both rewards over the steps: the mean of each arm, and a band from its lowest seed up."""
    names = [name for name in PROTOCOL if any(run.setting == name for run in found)]
    figure = Figure(
        figsize=(max(7, 2.9 * len(names)), 5.6), layout="constrained", facecolor=LOOK.background
    )
    panels = figure.subplots(2, len(names), sharex="col", sharey=True, squeeze=False)
    for row, (size, of) in zip(panels, OF_REWARD.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            _draw_curves(axes, found, name, size)
            what = f"{size} reward{of.get(name, of[''])}"
            axes.set_title(f"{SETTINGS[name].title}:\n{what}", loc="left", size=11)
    for axes in panels[1]:
        axes.set_xlabel("training step")
    figure.supylabel("share of the reward that is earned", size=11)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)
    return figure


def _draw_curves(axes: Axes, found: Results, name: str, size: str) -> None:
    setting = SETTINGS[name]
    for arm in (arm for arm in NAMES if arm in setting.arms):
        runs = [run for s in setting.seeds if (run := Run(name, arm, s)) in found]
        if runs:
            lines = np.array([found[run].shares[size] for run in runs])
            steps = range(1, lines.shape[1] + 1)
            axes.fill_between(
                steps, lines.min(0), lines.max(0), color=COLOURS[arm], alpha=0.15, linewidth=0
            )
            look: dict[str, Any] = {"color": COLOURS[arm], "linestyle": STYLES[arm]}
            axes.plot(steps, lines.mean(0), linewidth=2.2, label=NAMES[arm], **look)
    axes.set(xlim=(1, None), ylim=(0, 1))
