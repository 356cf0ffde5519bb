"""What each estimator reaches of the demonstration's rewards: all seeds, and their mean."""

import math

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.experiments.demonstration import LAST, curves, mean
from workshop.looks import LOOK, STYLE, colours_of

# {setting: {reward: (what it is, what the picture shows, highest value, form of a number)}}
PANELS = {
    "judge": {
        "format": ("Format check (0 or 1):", "only GDPO learns it", 1.0, ".2f"),
        "judge": ("Judge (0 to 100):", "both learn it", 100, ".0f"),
    },
    "sentences": {
        "words": ("Both words, used in a sentence (0 to 1):", "GRPO does not learn it", 1.0, ".2f"),
        "length": ("The asked number of words (0 to 100):", "all learn it", 100, ".0f"),
    },
}
ARMS = {
    "judge": {"gdpo": "GDPO", "grpo": "GRPO"},
    "sentences": {"gdpo": "GDPO", "grpo_by_range": "GRPO by range", "grpo": "GRPO"},
}
SIZE = (9.0, 3.9)  # inches
NAMES_APART = 0.075  # of the height
WHAT_IS_SHOWN = f"training step; a number is the mean of the last {LAST}, a thin line is one run"


def demonstration(setting: str) -> Figure:
    """A panel for each reward; a thin line is a seed, a thick one the mean of all."""
    with mpl.rc_context({**STYLE, "font.size": 12, "axes.titlesize": 13}):
        figure = Figure(figsize=SIZE, layout="constrained", facecolor=LOOK.background)
        panels = figure.subplots(1, len(PANELS[setting]))
        for axes, reward in zip(panels, PANELS[setting], strict=True):
            _draw(axes, setting, reward)
        figure.supxlabel(WHAT_IS_SHOWN, size=12)
    return figure


def _draw(axes: Axes, setting: str, reward: str) -> None:
    what, shown, highest, form = PANELS[setting][reward]
    axes.set_title(f"{what}\n{shown}", loc="left", fontweight="bold", pad=10)
    colours = colours_of(ARMS[setting])
    ends: dict[str, float] = {}  # where the thick lines end
    for arm, colour in colours.items():
        seeds = np.array([*curves()[setting, arm, reward].values()])
        steps = range(1, seeds.shape[1] + 1)
        axes.plot(steps, seeds.T, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, seeds.mean(0), color=colour, linewidth=2.8)
        ends[arm] = float(seeds.mean(0)[-1])
    at = math.inf
    for arm in sorted(ends, key=ends.__getitem__, reverse=True):
        at = min(ends[arm], at - NAMES_APART * highest)
        text = f" {ARMS[setting][arm]} {mean(setting, arm, reward):{form}}"
        axes.text(
            steps[-1], at, text, va="center", color=colours[arm], fontweight="bold", fontsize=11
        )
    axes.set(xlim=(1, len(steps)), ylim=(0, highest))
    axes.grid(axis="y", color=LOOK.quiet, linewidth=0.6, alpha=0.6)
    axes.tick_params(length=0)
