"""What the arms earn of the demonstration's rewards: all seeds, and their mean."""

import math

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.experiments.demonstration import curves, mean
from workshop.looks import LOOK, STYLE, colours_of

# {setting: {reward: (title, highest value)}}; the lines' names stand in the first panel
PANELS = {
    "judge": {
        "format": ("Format: 0 or 1", 1.0),
        "judge": ("Judge: 0 to 100, noise of 10 points", 100),
    },
    "model": {
        "keyword": ("Uses the word: 0 or 1", 1.0),
        "words": ("Few words / 10", 1.0),
        "ending": ("Ends as asked: 0 or 1", 1.0),
    },
}
ARMS = {
    "judge": {"gdpo": "GDPO", "grpo": "GRPO"},
    "model": {"gdpo": "GDPO", "grpo": "GRPO", "grpo_divided": "divided"},
}
NAMES_APART = 0.07  # of the height


def demonstration(setting: str) -> Figure:
    """A panel for each reward; a thin line is a seed, a thick one the mean of all."""
    with mpl.rc_context({**STYLE, "font.size": 12, "axes.titlesize": 13}):
        figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor=LOOK.background)
        panels = figure.subplots(1, len(PANELS[setting]))
        for axes, reward in zip(panels, PANELS[setting], strict=True):
            _draw(axes, setting, reward, with_names=axes is panels[0])
    return figure


def _draw(axes: Axes, setting: str, reward: str, with_names: bool) -> None:
    title, highest = PANELS[setting][reward]
    axes.set_title(title, loc="left", fontweight="bold", pad=10)
    at, end_of = math.inf, {arm: mean(setting, arm, reward) for arm in ARMS[setting]}
    colours = colours_of(ARMS[setting])
    for arm in sorted(end_of, key=end_of.__getitem__, reverse=True):
        colour = colours[arm]
        seeds = np.array([*curves()[setting, arm, reward].values()])
        steps, at = range(1, seeds.shape[1] + 1), min(end_of[arm], at - NAMES_APART * highest)
        axes.plot(steps, seeds.T, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, seeds.mean(0), color=colour, linewidth=2.8)
        if with_names:
            text = f" {ARMS[setting][arm]} {end_of[arm]:.2f}"
            axes.text(steps[-1], at, text, va="center", color=colour, fontweight="bold")
    axes.set(xlabel="training step", xlim=(1, len(steps)), ylim=(0, highest))
    axes.grid(axis="y", color=LOOK.quiet, linewidth=0.6, alpha=0.6)
    axes.tick_params(length=0)
