"""The pictures of docs/in_verls_trainer.md. Draws only."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_gdpo.tools.plots import THEMES, style
from workshop.experiments.trainer.compare import (
    COMPARISONS,
    MATTERS,
    Difference,
    Results,
    difference,
)
from workshop.experiments.trainer.settings import SETTINGS, Run

PICTURES = Path(__file__).parents[3] / "docs" / "in_verls_trainer"
LOOK = THEMES["light"]
NAMES = {"gdpo": "GDPO", "grpo": "GRPO", "grpo_rescaled": "rescaled GRPO"}
STYLES = {"gdpo": "-", "grpo": "--", "grpo_rescaled": ":"}
COLOURS = dict(zip(NAMES, LOOK.colours, strict=False))


def draw(found: Results, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style(LOOK)):
        differences(found).savefig(folder / "differences.png", dpi=150)
        curves(found).savefig(folder / "curves.png", dpi=150)


def differences(found: Results) -> Figure:
    """The comparisons of the protocol that have a seed: each seed, the mean, and the interval."""
    # in the order of the settings, from top to bottom
    rows = sorted(COMPARISONS, key=lambda row: [*SETTINGS].index(row[0]))
    gains = {row: gain for row in rows if (gain := difference(found, *row)).of_seed}
    figure = Figure(
        figsize=(8.6, 1.6 + 0.5 * len(gains)), layout="constrained", facecolor=LOOK.background
    )
    axes = figure.subplots()
    names = []
    for place, ((setting, _, other), gain) in enumerate(gains.items()):
        _draw_difference(axes, place, gain, COLOURS[other])
        done, planned = len(gain.of_seed), len(gain.seeds)
        part = "" if done == planned else f" ({done} of {planned} seeds)"
        names.append(f"{SETTINGS[setting].title}: minus {NAMES[other]}{part}")
    axes.axvspan(-MATTERS, MATTERS, color=LOOK.quiet, alpha=0.5, linewidth=0)
    axes.axvline(0, color=LOOK.ink, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    figure.supxlabel("how much more of the small reward GDPO earns, mean over training", size=11)
    return figure


def _draw_difference(axes: Axes, place: int, gain: Difference, colour: str) -> None:
    seeds = [*gain.of_seed.values()]
    axes.plot(seeds, [place - 0.25] * len(seeds), "|", color=colour, markersize=7)
    if len(seeds) > 1:
        is_claimed = gain.verdict != "not complete"
        axes.errorbar(
            gain.mean,
            place,
            xerr=gain.half_width,
            fmt="o",
            color=colour,
            markerfacecolor=colour if is_claimed else LOOK.background,
            markersize=7,
        )


def curves(found: Results) -> Figure:
    """The small reward over the steps: a thin line for each seed, and the mean of an arm."""
    names = [name for name in SETTINGS if any(run.setting == name for run in found)]
    figure = Figure(
        figsize=(max(7, 4.0 * len(names)), 3.7), layout="constrained", facecolor=LOOK.background
    )
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        _draw_curves(axes, found, name)
    panels[0].set_ylabel("share of the small reward")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper left", ncols=3, frameon=False
    )
    return figure


def _draw_curves(axes: Axes, found: Results, name: str) -> None:
    setting = SETTINGS[name]
    seeds = {run.seed for run in found if run.setting == name and run.arm in NAMES}
    for arm in (arm for arm in NAMES if arm in setting.arms):
        lines = [found[run].small for s in setting.seeds if (run := Run(name, arm, s)) in found]
        look: dict[str, Any] = {"color": COLOURS[arm], "linestyle": STYLES[arm]}
        for line in lines:
            axes.plot(range(1, len(line) + 1), line, linewidth=0.8, alpha=0.5, **look)
        if lines:
            mean = np.mean(lines, axis=0)
            axes.plot(range(1, len(mean) + 1), mean, linewidth=2.2, label=NAMES[arm], **look)
    axes.set(xlabel="step", xlim=(1, None), ylim=(0, 1))
    axes.set_title(f"{setting.title}, seeds: {len(seeds)}", loc="left")
