"""Compares the advantages of two estimators in one step.

Estimators have different scales, because GRPO has no batch step. So advantages are compared in
units of their own standard deviation over the step. Shape suffixes: B rollouts, G groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from verl_gdpo.advantage.zero import SAME_STD, is_apart, std_or_0
from verl_gdpo.batch.advantages import correlation, within_groups
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.ties import tied_pairs
from verl_gdpo.tools.replay.recompute import Floats, Ints

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Column:
    """The advantages of one estimator in one step."""

    A_B: Floats
    scaled_B: Floats  # in units of `std`
    std: float  # over the rollouts, ddof 0
    trained_B: Bools  # False in the groups in which all advantages are 0
    silent_groups: float  # the share of those groups
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
        std = std_or_0(A_B)
        scaled_B = A_B / std if std else np.full_like(A_B, A_B.mean())
        active_G: Bools = np.bincount(group_B, is_apart(scaled_B)) > 0
        values_BK, present_BK = rewards.values_BK[rows_B], rewards.present_BK[rows_B]
        weights_K = np.array(list(rewards.weights.values()))
        rounded_B = np.round(scaled_B / SAME_STD)
        return cls(
            A_B=A_B,
            scaled_B=scaled_B,
            std=std,
            trained_B=active_G[group_B],
            silent_groups=float(1 - active_G.mean()),
            ties=tied_pairs([rounded_B], values_BK, present_BK, weights_K, group_B)[0],
            follows={
                name: _follows(scaled_B[there_B], value_B[there_B], group_B[there_B])
                for name, value_B, there_B in zip(
                    rewards.weights, values_BK.T, present_BK.T, strict=True
                )
            },
        )

    def correlation(self, other: "Column") -> float | None:
        """Return the correlation of the advantages; None if one column is constant."""
        return correlation(self.scaled_B, other.scaled_B)

    def opposite(self, other: "Column") -> float:
        """Return the share of rollouts that one column rewards and the other punishes."""
        away_B = is_apart(self.scaled_B) & is_apart(other.scaled_B)
        return float(np.mean(away_B & (self.A_B * other.A_B < 0)))

    def distance_B(self, other: "Column") -> Floats:
        """Return |difference|, where no group that is silent in both counts in a std.

        Else the same groups would be further apart in a step that has more silent ones.
        """
        share = np.mean(self.trained_B | other.trained_B)
        result: Floats = np.abs(self.scaled_B - other.scaled_B) * np.sqrt(share)
        return result


def _follows(scaled_B: Floats, value_B: Floats, group_B: Ints) -> float | None:
    return correlation(scaled_B, within_groups(value_B, group_B))
