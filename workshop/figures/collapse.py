"""How many groups an estimator can tell apart: the paper's figure, by enumeration.

A group of G samples with n binary rewards is a multiset of G binary vectors. Two groups are told
apart if their sorted advantages, before any batch step, differ. Weights are 1, eps is 0.
"""

from itertools import combinations_with_replacement, product
from math import comb

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_gdpo.algorithm.equation import compute_gdpo_scalars
from workshop.looks import LOOK, STYLE, colours_of

Groups = npt.NDArray[np.float64]

SAMPLES, REWARDS = range(2, 9), range(2, 7)  # of the paper's figure
# name: (group_norm, normalize_by_std)
ESTIMATORS: dict[str, tuple[str, bool]] = {
    "GDPO": ("per_reward", True),
    "GRPO": ("summed", True),
    "GRPO w/o std": ("summed", False),
}


def collapse() -> Figure:
    """What each estimator tells apart, over the samples of a group, and over its rewards."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 3.6), layout="constrained", facecolor=LOOK.background)
        left, right = figure.subplots(1, 2)
        _draw(left, "of 2 rewards", "samples in a group, G", {g: (g, 2) for g in SAMPLES})
        _draw(right, "of 4 samples", "binary rewards, n", {n: (4, n) for n in REWARDS})
        left.legend(frameon=False, handlelength=3)
    return figure


def _draw(axes: Axes, which: str, xlabel: str, sizes: dict[int, tuple[int, int]]) -> None:
    colours = colours_of(ESTIMATORS)
    for name, line, mark in zip(ESTIMATORS, ["-", "--", ":"], "os^", strict=True):
        colour = colours[name]
        counts = [distinct_groups(name, *size) for size in sizes.values()]
        axes.plot([*sizes], counts, color=colour, linestyle=line, marker=mark, label=name)
    axes.set(xlabel=xlabel, ylabel="distinct groups of advantages", xticks=[*sizes])
    axes.set_title(f"Groups told apart, {which}", loc="left", fontweight="bold")
    axes.grid(color=LOOK.quiet, linewidth=0.6, alpha=0.6)


def distinct_groups(estimator: str, samples: int, rewards: int) -> int:
    """Number of different advantage vectors of a group of `samples` with `rewards` rewards."""
    group_norm, normalize_by_std = ESTIMATORS[estimator]
    groups_GRK = _all_groups(samples, rewards)
    count = len(groups_GRK)
    scalars = compute_gdpo_scalars(
        groups_GRK.reshape(count * samples, rewards),
        np.repeat(np.arange(count), samples),
        group_norm=group_norm,
        normalize_by_std=normalize_by_std,
        batch_norm="none",
        eps=0.0,
    )
    advantages_GR = np.sort(scalars.S_B.numpy().reshape(count, samples), axis=1)
    return len(np.unique(advantages_GR.round(6) + 0.0, axis=0))  # -0.0 becomes 0.0


def _all_groups(samples: int, rewards: int) -> Groups:
    """Every group, (groups, samples, rewards).

    The advantages do not depend on the order of the samples, nor, with equal weights, on that
    of the rewards: so all multisets of rows will do, or all multisets of columns, which may be
    far fewer.
    """
    if comb(2**rewards + samples - 1, samples) <= comb(2**samples + rewards - 1, rewards):
        return _multisets(samples, rewards)
    return np.swapaxes(_multisets(rewards, samples), 1, 2)


def _multisets(size: int, length: int) -> Groups:
    """All multisets of `size` binary vectors of a length."""
    vectors = np.array(list(product((0.0, 1.0), repeat=length)))
    chosen = np.array(list(combinations_with_replacement(range(2**length), size)))
    multisets: Groups = vectors[chosen]
    return multisets
