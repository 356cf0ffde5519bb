"""The picture of the map in workshop/experiments/RESULTS.md. Draws only."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.experiments.map.compare import MATTERS, OPTIMIZERS, gain
from workshop.looks import LOOK, STYLE

NAMES = {"grpo": "GDPO minus GRPO", "grpo_range": "GDPO minus rescaled GRPO"}
OF_OPTIMIZER = {"one scale": "one scale for all parameters", "adam": "Adam"}
ANSWER = {  # setting: what it is, for somebody who has not read the page
    "two, 20:1": "easy reward: 20 times the range",
    "as ToolRL: format x 1, graded x 6": "hard reward: 6 times the range",
    "two, 1:1": "equal ranges, one easy, one hard",
    "four answers, equal": "equal ranges, four hard",
    "two, range by prompt": "range by prompt, one easy, one hard",
    "two answers, range by prompt": "range by prompt, two hard",
    "short x 1 anyway": "short and correct",
    "short x 1 if correct": "short, counts only if correct",
    "wrong in 20 %, 6:1": "6 times the range, wrong in 20 %",
    "two and noise of 0.05": "two rewards, and small noise",
    "conflict, 6:1, judged by range": "two exclude each other, large wanted",
}


def draw(folder: Path) -> None:
    with mpl.rc_context(STYLE):
        answer().savefig(folder / "map.png", dpi=150)


def answer() -> Figure:
    """GDPO minus GRPO, and minus rescaled GRPO, with intervals, for some settings."""
    figure = Figure(figsize=(9.6, 5.4), layout="constrained", facecolor=LOOK.background)
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for axes, rival in zip(panels, NAMES, strict=True):
        for k, optimizer in enumerate(OPTIMIZERS):
            _draw_gains(axes, rival, optimizer, k)
        axes.axvspan(-MATTERS, MATTERS, color=LOOK.quiet, alpha=0.5, linewidth=0)
        axes.axvline(0, color=LOOK.ink, linewidth=0.8)
        axes.set_title(NAMES[rival], loc="left", fontweight="bold")
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(range(len(ANSWER)), ANSWER.values())
    panels[0].set_ylim(len(ANSWER) - 0.5, -0.5)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=2, frameon=False
    )
    figure.supxlabel(
        "how much more of the rewards GDPO gets (1 is all of them), mean over training\n"
        "right of 0: GDPO is better; grey: too small to matter; rescaled: rewards divided by "
        "their ranges",
        size=10,
    )
    return figure


def _draw_gains(axes: Axes, rival: str, optimizer: str, k: int) -> None:
    gains = [gain(optimizer, setting, rival) for setting in ANSWER]
    colour = LOOK.colours[k]
    axes.errorbar(
        [one.mean for one in gains],
        np.arange(len(gains)) + (0.16 if k else -0.16),
        xerr=[one.half_width for one in gains],
        fmt="so"[k],
        color=colour,
        markerfacecolor=colour if k else LOOK.background,
        label=f"optimiser: {OF_OPTIMIZER[optimizer]}",
        markersize=6,
    )
