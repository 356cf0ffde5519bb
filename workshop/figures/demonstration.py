"""What GRPO and GDPO earn of the demonstration's two rewards: all seeds, and their mean."""

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workshop.experiments.demonstration import LAST, curves
from workshop.looks import LOOK, STYLE

ARMS = {"gdpo": "GDPO", "grpo": "GRPO"}
PANELS = {"format": ("Format: 0 or 1", 1.0), "judge": ("Judge: 0 to 100, noise of 10 points", 100)}


def demonstration() -> Figure:
    """A panel for each reward; a thin line is a seed, a thick one the mean of all."""
    with mpl.rc_context({**STYLE, "font.size": 12, "axes.titlesize": 13}):
        figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor=LOOK.background)
        for axes, reward in zip(figure.subplots(1, 2), PANELS, strict=True):
            _draw(axes, reward)
    return figure


def _draw(axes: Axes, reward: str) -> None:
    title, highest = PANELS[reward]
    axes.set_title(title, loc="left", fontweight="bold", pad=10)
    for (arm, name), colour in zip(ARMS.items(), LOOK.colours, strict=False):
        seeds = np.array([*curves()["judge", arm, reward].values()])
        steps, mean = range(1, seeds.shape[1] + 1), seeds.mean(0)
        axes.plot(steps, seeds.T, color=colour, linewidth=0.8, alpha=0.35)
        axes.plot(steps, mean, color=colour, linewidth=2.8)
        if reward == "format":  # the judge's curves lie on each other
            axes.annotate(
                f"{name} {mean[-LAST:].mean():.2f}",
                (steps[-1], mean[-LAST:].mean()),
                (6, 0),
                textcoords="offset points",
                va="center",
                color=colour,
                fontweight="bold",
            )
    axes.set(xlabel="training step", xlim=(1, len(mean)), ylim=(0, highest))
    axes.grid(axis="y", color=LOOK.quiet, linewidth=0.6, alpha=0.6)
    axes.tick_params(length=0)
