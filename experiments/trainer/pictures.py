"""The pictures of docs/in_verls_trainer.md. Draws only."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.trainer.compare import COMPARISONS, MATTERS, Results, difference
from experiments.trainer.settings import SETTINGS, Run
from verl_gdpo.tools.plots import THEMES, style

PICTURES = Path(__file__).parents[2] / "docs" / "in_verls_trainer"
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
    """The seven comparisons of the protocol: each seed, the mean, and the interval."""
    figure = Figure(figsize=(8.6, 4.2), layout="constrained", facecolor=LOOK.background)
    axes = figure.subplots()
    names = []
    # the order of the settings, and from top to bottom
    rows = sorted(COMPARISONS, key=lambda row: [*SETTINGS].index(row[0]))
    for place, (setting, arm, other) in enumerate(rows):
        gain = difference(found, setting, arm, other)
        colour = COLOURS[other]
        seeds = [*gain.of_seed.values()]
        axes.plot(seeds, [place - 0.22] * len(seeds), "|", color=colour, markersize=7)
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
        of = "" if len(seeds) == len(gain.seeds) else f" ({len(seeds)} of {len(gain.seeds)} seeds)"
        names.append(f"{SETTINGS[setting].title}: minus {NAMES[other]}{of}")
    axes.axvspan(-MATTERS, MATTERS, color=LOOK.quiet, alpha=0.5, linewidth=0)
    axes.axvline(0, color=LOOK.ink, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlabel("how much more of the small reward GDPO earns, mean over training")
    return figure


def curves(found: Results) -> Figure:
    """The small reward over the steps: a thin line for each seed, and the mean of an arm."""
    figure = Figure(
        figsize=(4.0 * len(SETTINGS), 3.7), layout="constrained", facecolor=LOOK.background
    )
    panels = figure.subplots(1, len(SETTINGS), sharey=True)
    for axes, name in zip(panels, SETTINGS, strict=True):
        _draw_curves(axes, found, name)
    panels[0].set_ylabel("share of the small reward")
    handles, labels = panels[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)
    return figure


def _draw_curves(axes: Axes, found: Results, name: str) -> None:
    setting = SETTINGS[name]
    seeds = {seed for seed in setting.seeds if any(Run(name, a, seed) in found for a in NAMES)}
    for arm in (arm for arm in NAMES if arm in setting.arms):
        lines = [found[run].small for s in setting.seeds if (run := Run(name, arm, s)) in found]
        look = {"color": COLOURS[arm], "linestyle": STYLES[arm]}
        for line in lines:
            axes.plot(range(1, len(line) + 1), line, linewidth=0.6, alpha=0.45, **look)
        if lines:
            mean = np.mean(lines, axis=0)
            axes.plot(range(1, len(mean) + 1), mean, linewidth=2.2, label=NAMES[arm], **look)
    axes.set(xlabel="step", ylim=(0, 1))
    axes.set_title(f"{setting.title}, {len(seeds)} seeds", loc="left")
