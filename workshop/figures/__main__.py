"""Draws the pictures of docs/.

    python -m workshop.figures                   # those that need no run
    python -m workshop.figures RUN [RUN ...]     # also those of runs, given their folders

The run of the pictures in docs/ is that of `./run_tool_rl.sh` without a GPU. report.png is the
first screen of `verl-gdpo report` on the runs, for which there must be a browser, and replay.svg is
`verl-gdpo replay` of the first one in a terminal.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from verl_gdpo import compute_gdpo_advantage
from workshop.figures import collapse, demonstration, screens
from workshop.looks import LOOK, STYLE, colours_of

DOCS = Path(__file__).parents[2] / "docs"

# two prompts with two samples each; a sample is (correctness, format)
GROUPS = {"a": [(0, 0), (0, 1)], "b": [(0, 0), (1, 1)]}
# GRPO as verl has it: the rewards are summed, and no step over the batch follows
ESTIMATORS: dict[str, dict[str, Any]] = {
    "GRPO": {"group_norm": "summed", "batch_norm": "none", "eps": 1e-6},
    "GDPO": {},
}


def advantages(settings: dict[str, Any]) -> dict[str, list[float]]:
    """{group: the advantage of each sample}; both groups are one batch."""
    rewards = [row for rows in GROUPS.values() for row in rows]
    ids = [name for name, rows in GROUPS.items() for _ in rows]
    A_B = compute_gdpo_advantage(rewards, ids, [[1]] * len(ids), **settings)[:, 0].tolist()
    return {
        name: [A for A, group in zip(A_B, ids, strict=True) if group == name] for name in GROUPS
    }


def idea() -> Figure:
    """A bar for each sample's advantage; one pair of axes an estimator."""
    with mpl.rc_context({**STYLE, "font.size": 12, "axes.titlesize": 13}):
        layout = ConstrainedLayoutEngine(wspace=0.08, h_pad=0.08)
        figure = Figure(figsize=(8, 3.9), layout=layout, facecolor=LOOK.background)
        axes = figure.subplots(1, 2, sharey=True)
        colours = colours_of(ESTIMATORS)
        for where, name in zip(axes, ESTIMATORS, strict=True):
            _draw_bars(where, name, advantages(ESTIMATORS[name]), colours[name])
        axes[0].set(ylabel="advantage", yticks=[])
        figure.supxlabel("each bar: one sample, with its rewards (correctness, format)", size=12)
    return figure


def _draw_bars(axes: Axes, estimator: str, groups: dict[str, list[float]], colour: str) -> None:
    ratio = max(groups["b"]) / max(groups["a"])
    seen = (
        "a and b look the same" if abs(ratio - 1) < 1e-3 else f"b counts {ratio:.3g} times as much"
    )
    axes.set_title(f"{estimator}: {seen}", fontweight="bold", pad=12)
    ticks: dict[float, str] = {}
    for number, (name, rows) in enumerate(GROUPS.items()):
        left = 2.7 * number
        bars = axes.bar([left, left + 1], groups[name], width=0.8, color=colour)
        axes.bar_label(
            bars, [f"{A:+.2f}".replace("-", "\N{MINUS SIGN}") for A in groups[name]], padding=3
        )
        ticks |= {left + place: f"({c}, {f})" for place, (c, f) in enumerate(rows)}
        differ = sum(len(set(column)) > 1 for column in zip(*rows, strict=True))
        text = f"group {name}:\n{differ} reward{'s differ' if differ > 1 else ' differs'}"
        below = axes.get_xaxis_transform()
        axes.text(left + 0.5, -0.13, text, transform=below, ha="center", va="top")
    axes.set_xticks([*ticks], [*ticks.values()])
    axes.axhline(0, color=LOOK.ink, linewidth=0.8)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    axes.margins(y=0.14)


def draw_runs(runs: Sequence[Path]) -> None:
    """What a person sees of runs: the report on all, and the replay of the first."""
    screens.report(runs, DOCS / "report.png")
    screens.replay(runs[0], DOCS / "replay.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m workshop.figures", description="Draws the pictures of docs/."
    )
    parser.add_argument(
        "runs", nargs="*", type=Path, metavar="RUN", help="for report.png and replay.svg"
    )
    runs = parser.parse_args().runs
    idea().savefig(DOCS / "idea.png", dpi=200)
    collapse.collapse().savefig(DOCS / "collapse.png", dpi=150)
    for setting, name in (("judge", "demonstration.png"), ("sentences", "real_model.png")):
        demonstration.demonstration(setting).savefig(DOCS / name, dpi=150)
        screens.make_smaller(DOCS / name)
    if runs:
        draw_runs(runs)


if __name__ == "__main__":
    main()
