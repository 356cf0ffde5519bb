"""The pictures of docs/when_gdpo_helps.md. Draws only."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_gdpo.tools.plots import THEMES, Line, Panel, style
from verl_gdpo.tools.plots import draw as draw_panels
from workshop.experiments.map.results import CURVE_ARMS, CURVES, MATTERS, Map
from workshop.experiments.map.settings import RANGES, SHARES, STEPS, grid_name

PICTURES = Path(__file__).parents[3] / "docs" / "when_gdpo_helps"
LOOK = THEMES["light"]
NAMES = {
    "gdpo": "GDPO",
    "grpo": "GRPO",
    "grpo_range": "GRPO, rewards rescaled",
}
ANSWER = {  # setting: what it is, for somebody who has not read the page
    "two, 6:1": "format with 6 times the range",
    "two, 20:1": "format with 20 times the range",
    "format x 1, answer 6 % x 16": "answer with 16 times the range",
    "as ToolRL: format x 1, graded x 6": "graded answer with 6 times the range",
    "two, 1:1": "equal ranges",
    "six, equal": "six rewards, equal ranges",
    "two answers, range by prompt": "two answers, range by prompt",
    "four answers, range by prompt": "four answers, range by prompt",
    "two, range by prompt": "format and answer, range by prompt",
    "short x 4 if correct": "short x 4, only if correct",
    "wrong in 20 %, 1:1": "wrong in 20 %",
    "wrong in 20 %, 6:1": "wrong in 20 %, format with 6 times the range",
    "two and noise of 0.05": "and a small reward of noise",
    "two and four noises of 0.05": "and four small rewards of noise",
    "conflict, 6:1, judged by range": "in conflict, the larger is wanted",
}


def draw(found: Map, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style(LOOK)):
        answer(found).savefig(folder / "answer.png", dpi=150)
        heat_map(found).savefig(folder / "heat_map.png", dpi=150)
    draw_panels(curves(found), folder / "curves.png")


def answer(found: Map) -> Figure:
    """GDPO minus GRPO, and minus GRPO on rescaled rewards, with intervals, for some settings."""
    figure = Figure(figsize=(8.6, 6.0), layout="constrained", facecolor=LOOK.background)
    axes = figure.subplots()
    places = np.arange(len(ANSWER))[::-1]
    for rival, shift, marker, colour in (
        ("grpo", 0.16, "o", LOOK.colours[0]),
        ("grpo_range", -0.16, "s", LOOK.colours[1]),
    ):
        gains = [found.gain(setting, rival) for setting in ANSWER]
        mean = np.array([gain.mean for gain in gains])
        ends = [mean - [g.low_all for g in gains], [g.high_all for g in gains] - mean]
        axes.errorbar(
            mean,
            places + shift,
            xerr=ends,
            fmt=marker,
            color=colour,
            markerfacecolor=colour if rival == "grpo" else LOOK.background,
            label=f"than {NAMES[rival]}",
            markersize=7,
        )
    axes.axvspan(-MATTERS, MATTERS, color=LOOK.quiet, alpha=0.5, linewidth=0)
    axes.axvline(0, color=LOOK.ink, linewidth=0.8)
    axes.set_yticks(places, ANSWER.values())
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("how much more of the rewards GDPO earns, mean over training")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    return figure


def heat_map(found: Map) -> Figure:
    """GDPO minus GRPO for every range and base rate of the second reward."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained", facecolor=LOOK.background)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, rival in zip(panels, ("grpo", "grpo_range"), strict=True):
        _draw_map(axes, found, rival)
    panels[0].set_ylabel("how often the answer is right\nbefore training")
    figure.supxlabel(
        "range of the answer's reward; the format has range 1, and is right in 12 % before training"
    )
    return figure


def _draw_map(axes: Axes, found: Map, rival: str) -> None:
    gains = [[found.gain(grid_name(share, size), rival) for size in RANGES] for share in SHARES]
    mean = np.array([[gain.mean for gain in row] for row in gains])
    top = max(found.gain(grid_name(s, r)).mean for s in SHARES for r in RANGES)
    axes.imshow(mean, cmap="Greys", vmin=0, vmax=1.4 * top, aspect="auto")
    for y, row in enumerate(gains):
        for x, gain in enumerate(row):
            sure = gain.low_all > 0 or gain.high_all < 0
            axes.text(
                x,
                y,
                _signed(gain.mean),
                ha="center",
                va="center",
                fontweight="bold" if sure else "normal",
                color=LOOK.background if gain.mean > 0.8 * top else LOOK.ink,
            )
    axes.set_xticks(range(len(RANGES)), RANGES)
    axes.set_yticks(range(len(SHARES)), SHARES)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"GDPO minus {NAMES[rival]}", loc="left", fontweight="bold")


def _signed(number: float) -> str:
    """+.031; what is shown as zero has no sign."""
    text = f"{number:+.3f}".replace("0.", ".", 1)
    return text[1:] if text[1:] == ".000" else text.replace("-", "\N{MINUS SIGN}")


def curves(found: Map) -> list[Panel]:
    """The reward that GRPO neglects, over the steps."""
    titles = ("range 1 beside range 20", "two, ranges by prompt", "with four rewards of noise")
    return [
        Panel(
            f"The answer: {title}",
            "step",
            "share of right answers",
            [
                Line(NAMES[arm], range(STEPS + 1), found.curves[setting, arm, 1], look=look)
                for look, arm in enumerate(CURVE_ARMS)
            ],
            ylim=(0, 1),
        )
        for title, setting in zip(titles, CURVES, strict=True)
    ]
