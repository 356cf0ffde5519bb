"""The pictures of docs/when_gdpo_helps.md. Draws only."""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import FuncNorm
from matplotlib.figure import Figure

from workshop.experiments.differences import signed
from workshop.experiments.map.compare import LESS, MATTERS, MORE, OPTIMIZERS, gain, joint
from workshop.looks import LOOK, style

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
LIMIT = 0.12  # of the colours
# how often the answer is right before training, and the range of its reward
SHARES = ("3 %", "6 %", "12 %", "25 %", "50 %")
GRID = "format x 1, answer {share} x {range}"
RANGES = ("1/16", "1/4", "1", "4", "16")


def draw(folder: Path) -> None:
    with mpl.rc_context(style(LOOK)):
        answer().savefig(folder / "answer.png", dpi=150)
        heat_map().savefig(folder / "heat_map.png", dpi=150)


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
        "how much more of the rewards GDPO earns (1 is all of them), mean over training\n"
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


def heat_map() -> Figure:
    """GDPO minus both rivals for every range and base rate of the second reward."""
    figure = Figure(figsize=(9.6, 6.6), layout="constrained", facecolor=LOOK.background)
    panels = figure.subplots(2, 2, sharey=True, sharex=True)
    for row, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for axes, rival in zip(row, NAMES, strict=True):
            _draw_map(axes, optimizer, rival)
    figure.supylabel("how often the answer is right before training", size=11)
    figure.supxlabel(
        "range of the answer's reward; the format has range 1, and is right in 12 % at first\n"
        "orange: GDPO earns more, blue: less, bold: both optimisers say so",
        size=11,
    )
    return figure


def _draw_map(axes: Axes, optimizer: str, rival: str) -> None:
    gains = [
        [gain(optimizer, GRID.format(share=share, range=size), rival) for size in RANGES]
        for share in SHARES
    ]
    mean = np.array([[one.mean for one in row] for row in gains])
    # roots, so that -0.01 does not look like 0
    norm = FuncNorm((_root, lambda x: np.sign(x) * np.square(x)), vmin=-LIMIT, vmax=LIMIT)
    axes.imshow(mean, cmap="PuOr_r", norm=norm, aspect="auto", alpha=0.75)
    for y, share in enumerate(SHARES):
        for x, size in enumerate(RANGES):
            is_sure = joint(GRID.format(share=share, range=size), rival) in (*MORE, *LESS)
            axes.text(
                x,
                y,
                _signed(mean[y, x]),
                ha="center",
                va="center",
                fontweight="bold" if is_sure else "normal",
                color=LOOK.ink,
            )
    axes.set_xticks(range(len(RANGES)), RANGES)
    axes.set_yticks(range(len(SHARES)), SHARES)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{NAMES[rival]},\n{OF_OPTIMIZER[optimizer]}", loc="left", size=11)


def _root(x: np.ndarray) -> np.ndarray:
    root: np.ndarray = np.sign(x) * np.sqrt(np.abs(x))
    return root


def _signed(number: float) -> str:
    """+.031"""
    return signed(number).replace("0.", ".", 1).replace("-", "\N{MINUS SIGN}")
