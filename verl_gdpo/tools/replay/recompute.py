"""Recomputes the advantages of one step of a rollout dump, under any settings.

Shape suffix: B rows of the step's dump, with padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.rows import RewardRows
from verl_gdpo.run.dump_reader import reward_rows
from verl_gdpo.tools.replay.arms import Arm

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

VERL_GRPO_EPS = 1e-6


@dataclass(frozen=True)
class Step:
    """The data of one step that every arm needs."""

    number: int
    rewards: RewardRows
    group_ids: npt.NDArray[Any]
    tokens_B: Ints  # number of trained tokens
    logged_B: Floats

    @classmethod
    def of(cls, number: int, rows: Sequence[Mapping[str, Any]]) -> "Step":
        """Return the step; raise ValueError if a logged advantage is not a finite number."""
        logged_B = np.array([row["advantage"] for row in rows], dtype=np.float64)
        for row in np.flatnonzero(~np.isfinite(logged_B)).tolist():
            raise ValueError(
                f"{rows[row]['uid']}: the logged advantage is {rows[row]['advantage']}; "
                "expected a finite number"
            )
        return cls(
            number=number,
            rewards=reward_rows(rows, number),
            group_ids=np.array([row["group"] for row in rows]),
            tokens_B=np.array([row["trained_tokens"] for row in rows], dtype=np.int64),
            logged_B=logged_B,
        )

    def advantages(self, arm: Arm, rewards: RewardMatrix) -> Floats:
        """Return each row's advantage as a dump holds it: 0 for padding and without trained tokens.

        Raises:
            ValueError: the arm's estimator is neither gdpo nor grpo.
        """
        counted_B = self.rewards.counted_B
        if arm.estimator == "gdpo":
            tokens_B = torch.from_numpy(self.tokens_B)
            scalars = scalars_of(rewards, counted_B, self.group_ids, arm.settings, tokens_B)
            A_B = scalars.A_B.numpy()
        elif arm.estimator == "grpo":
            scores_B = rewards.values_BK @ np.array(list(rewards.weights.values()))
            group_B = group_numbers(self.group_ids[counted_B])
            A_B = np.zeros(len(scores_B))
            A_B[counted_B] = verl_grpo(scores_B[counted_B], group_B, arm.settings.normalize_by_std)
        else:
            raise ValueError(f"adv_estimator={arm.estimator}: replay only computes gdpo and grpo")
        trained_B = (self.tokens_B > 0) & ~self.rewards.is_padding_B
        result: Floats = np.where(trained_B, A_B[self.rewards.session_B], 0.0)
        return result


def verl_grpo(scores_B: Floats, group_B: Ints, normalize_by_std: bool) -> Floats:
    """Return A_B of verl's own `grpo`, with the same float32 operations.

    So we get the numbers that verl trains with. A constant score that float32 cannot hold can leave
    a residue of about 0.1, and the sample of a group of one keeps its score. One difference
    remains: a dump does not keep the order of a group's rows, which can change the last bit of its
    mean.

    Args:
        group_B: the group of each row, numbered 0, 1, ...

    Source: `compute_grpo_outcome_advantage` of verl 0.9.
    """
    order = np.argsort(group_B, kind="stable")
    size_G = torch.from_numpy(np.bincount(group_B))
    scores = torch.from_numpy(scores_B[order].astype(np.float32))
    groups = torch.split(scores, size_G.tolist())
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    mean_G = torch.stack([torch.mean(group) if len(group) > 1 else zero for group in groups])
    std_G = torch.stack([torch.std(group) if len(group) > 1 else one for group in groups])
    result = scores - mean_G.repeat_interleave(size_G)
    if normalize_by_std:
        result = result / (std_G + VERL_GRPO_EPS).repeat_interleave(size_G)
    A_B = np.empty(len(scores_B))
    A_B[order] = result.numpy()
    return A_B


def group_numbers(group_ids: npt.NDArray[Any]) -> Ints:
    """Return the group number of each row, (B,) int64."""
    index: Ints = np.unique(group_ids, return_inverse=True)[1].astype(np.int64)
    return index
