"""How two sets of advantages of one step differ. B rollouts, each counted once; G groups.

Estimators have different scales (GRPO has no batch step), so magnitudes are compared after a
division of each by its own standard deviation over the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_gdpo.replay.recompute import Floats, Ints
from verl_gdpo.reward_rows import RewardMatrix

# in units of the step's standard deviation: closer than this is the same. Well above what eps does
# to advantages that would else be equal, or cancel to 0
SAME = 1e-3
ROUNDING = 1e-6  # of the largest value: what float32 leaves of a constant


@dataclass(frozen=True)
class Column:
    """Advantages of one estimator in one step, and what can be said of them alone."""

    A_B: Floats
    std: float  # over the rollouts, ddof 0
    silent_groups: float  # share of groups in which every advantage is 0
    distinct: int  # different advantages in the step
    ties: float | None  # share of the pairs of a group with different rewards but one advantage
    follows: Mapping[str, float | None]  # correlation with each reward; see `_follows`
    tied_B: Ints  # rollouts of a group with the same number have the same advantage
    rewards_B: Ints  # rollouts with the same number have the same rewards

    @property
    def scaled_B(self) -> Floats:
        """In units of its standard deviation; all 0 where there is none."""
        return self.A_B / self.std if self.std > 0 else np.zeros_like(self.A_B)


@dataclass(frozen=True)
class Difference:
    """Between two columns of one step."""

    correlation: float | None  # None where one of them is constant
    opposite: float  # share of rollouts that one rewards and the other punishes
    distance: float  # mean of |difference| after scaling
    distance_B: Floats


def describe(A_B: Floats, group_B: Ints, rewards: RewardMatrix, rows_B: Ints) -> Column:
    """Args: rewards holds all rows of the dump; rows_B are those of the B rollouts."""
    std = float(A_B.std())
    if np.ptp(A_B) <= ROUNDING * np.abs(A_B).max():
        std = 0.0
    unit = std or 1.0
    active_B = np.bincount(group_B, np.abs(A_B) > SAME * unit) > 0
    levels, tied_B = np.unique(np.round(A_B / unit / SAME), return_inverse=True)
    weights_K = np.array(list(rewards.weights.values()))
    columns = (rewards.values_BK, rewards.present_BK.astype(np.float64))
    kinds = np.hstack([values[rows_B][:, weights_K != 0] for values in columns])
    rewards_B = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
    different = _pairs(group_B) - _pairs(group_B, rewards_B)
    tied = _pairs(group_B, tied_B) - _pairs(group_B, tied_B, rewards_B)
    return Column(
        A_B=A_B,
        std=std,
        silent_groups=float(1 - active_B.mean()),
        distinct=len(levels),
        ties=tied / different if different else None,
        follows=_follows(A_B, group_B, rewards, rows_B),
        tied_B=tied_B,
        rewards_B=rewards_B,
    )


def difference(a: Column, b: Column) -> Difference:
    distance_B = np.abs(a.scaled_B - b.scaled_B)
    signs = [np.where(np.abs(c.A_B) > SAME * (c.std or 1.0), np.sign(c.A_B), 0) for c in (a, b)]
    return Difference(
        correlation=_correlation(a.A_B, b.A_B),
        opposite=float(np.mean(signs[0] * signs[1] < 0)),
        distance=float(distance_B.mean()),
        distance_B=distance_B,
    )


def _follows(
    A_B: Floats, group_B: Ints, rewards: RewardMatrix, rows_B: Ints
) -> dict[str, float | None]:
    """The correlation of the advantages with each reward less its group's mean, where present."""
    result = {}
    for column, name in enumerate(rewards.weights):
        there_B = rewards.present_BK[rows_B, column]
        group, value = group_B[there_B], rewards.values_BK[rows_B, column][there_B]
        mean_G = np.bincount(group, value) / np.bincount(group).clip(min=1)
        result[name] = _correlation(A_B[there_B], value - mean_G[group])
    return result


def _correlation(a_B: Floats, b_B: Floats) -> float | None:
    """Pearson's; None where there is none, because one of them is constant but for rounding."""
    if any(len(x_B) == 0 or np.ptp(x_B) <= ROUNDING * np.abs(x_B).max() for x_B in (a_B, b_B)):
        return None
    return float(np.corrcoef(a_B, b_B)[0, 1])


def _pairs(*index: Ints) -> int:
    """Unordered pairs of rows that agree in every index; each is 0, 1, ..."""
    key_B = index[0]
    for other_B in index[1:]:
        key_B = key_B * (int(other_B.max()) + 1) + other_B
    counts = np.unique(key_B, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
