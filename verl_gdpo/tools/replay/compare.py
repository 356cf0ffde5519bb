"""Compares the advantages of two estimators in one step.

Estimators have different scales, because GRPO has no batch step. So advantages are compared in
units of their own standard deviation over the step. Shape suffixes: B rollouts, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import correlation
from verl_gdpo.tools.replay.recompute import Floats, Ints

# advantages closer than this, in units of the step's std, are the same. Smaller differences can
# come from eps alone
SAME_STD = 1e-3
ROUNDING = 1e-6  # a std below this share of the largest value is float32 rounding of a constant


@dataclass(frozen=True)
class Column:
    """The advantages of one estimator in one step."""

    A_B: Floats
    scaled_B: Floats  # in units of `std`
    std: float  # over the rollouts, ddof 0
    silent_groups: float  # share of groups in which all advantages are 0
    ties: float | None  # share of pairs in a group with different rewards, but equal advantages
    follows: Mapping[str, float | None]  # correlation with (reward minus its mean in the group)

    @classmethod
    def of(cls, A_B: Floats, group_B: Ints, rewards: RewardMatrix, rows_B: Ints) -> "Column":
        """Return the column.

        Args:
            A_B, group_B: the advantage and the group number of each rollout.
            rewards: the rewards of all rows of the dump.
            rows_B: the row of each rollout in the dump.
        """
        std, scaled_B = float(A_B.std()), A_B
        if std > ROUNDING * np.abs(A_B).max():
            scaled_B = A_B / std
        else:
            std, scaled_B = 0.0, np.full_like(A_B, A_B.mean())
        active_G = np.bincount(group_B, np.abs(scaled_B) > SAME_STD) > 0
        values_BK, present_BK = rewards.values_BK[rows_B], rewards.present_BK[rows_B]
        names, used_K = list(rewards.weights), np.array(list(rewards.weights.values())) != 0
        return cls(
            A_B=A_B,
            scaled_B=scaled_B,
            std=std,
            silent_groups=float(1 - active_G.mean()),
            ties=_ties(scaled_B, np.hstack([values_BK[:, used_K], present_BK[:, used_K]]), group_B),
            follows={
                name: _follows(scaled_B[there_B], value_B[there_B], group_B[there_B])
                for name, value_B, there_B in zip(names, values_BK.T, present_BK.T, strict=True)
            },
        )

    def correlation(self, other: "Column") -> float | None:
        """Return the correlation of the advantages; None if one column is constant."""
        return correlation(self.scaled_B, other.scaled_B)

    def opposite(self, other: "Column") -> float:
        """Return the share of rollouts that one column rewards and the other punishes."""
        away_B = (np.abs(self.scaled_B) > SAME_STD) & (np.abs(other.scaled_B) > SAME_STD)
        return float(np.mean(away_B & (self.A_B * other.A_B < 0)))

    def distance_B(self, other: "Column") -> Floats:
        result: Floats = np.abs(self.scaled_B - other.scaled_B)
        return result


def _ties(scaled_B: Floats, rewards_B: Floats, group_B: Ints) -> float | None:
    advantage_B = np.unique(np.round(scaled_B / SAME_STD), return_inverse=True)[1]
    kind_B = np.unique(rewards_B, axis=0, return_inverse=True)[1].reshape(-1)
    different = _pairs(group_B) - _pairs(group_B, kind_B)
    tied = _pairs(group_B, advantage_B) - _pairs(group_B, advantage_B, kind_B)
    return tied / different if different else None


def _pairs(*index: Ints) -> int:
    """Return the number of pairs of rows that agree in every index."""
    key_B = index[0]
    for other_B in index[1:]:
        key_B = key_B * (int(other_B.max()) + 1) + other_B
    counts = np.unique(key_B, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())


def _follows(scaled_B: Floats, value_B: Floats, group_B: Ints) -> float | None:
    mean_G = np.bincount(group_B, value_B) / np.bincount(group_B).clip(min=1)
    centred_B = value_B - mean_G[group_B]
    centred_B[np.abs(centred_B) <= 1e-9 * np.abs(value_B).max(initial=0)] = 0  # removes rounding
    return correlation(scaled_B, centred_B)
