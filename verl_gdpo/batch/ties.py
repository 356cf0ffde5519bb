"""Pairs of samples of a group that differ in their rewards and get one advantage.

Shape suffixes: B samples, K rewards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.advantage.equation import normalize_groups
from verl_gdpo.advantage.zero import (
    Ranges,
    precision_of,
    sum_without_rounding,
    to_6_decimals,
    without_last_digits,
)
from verl_gdpo.batch.advantages import Bools, Floats, Ints


def advantages_without_eps(
    values_BK: Floats, present_BK: Bools, weights_K: Floats, group_B: Ints
) -> tuple[Floats, Floats]:
    """Return S of GDPO and of GRPO with eps=0, rounded, so that those that are the same are equal.

    eps must be 0 because it makes the rewards (0, 1) and (0, 2) different in GRPO. Without eps, a
    rounding error of the input would become an advantage, so the last digits of each reward and of
    the sum are left out. If rewards spread over 1 % of their size, advantages are then right to
    about 1e-10; they count as equal if 6 decimals agree. Step 3 only scales, so it is left out.

    Args:
        group_B: numbered from 0.
    """
    K = len(weights_K)
    # K + 1 columns, each in one piece of memory: numpy is slow at rows of few numbers
    with_sum_BK = np.vstack([values_BK.T, values_BK @ weights_K]).T
    rewards_BK = torch.from_numpy(without_last_digits(with_sum_BK))
    there_BK = torch.from_numpy(np.hstack([present_BK, np.ones_like(present_BK[:, :1])]))
    group = torch.from_numpy(group_B)
    z_BK, ranges = normalize_groups(rewards_BK, there_BK, group, int(group.max()) + 1, eps=0.0)
    precision_K = precision_of(rewards_BK, rewards_BK.dtype)
    scaled_K = torch.from_numpy(weights_K / (np.abs(weights_K).max() or 1.0))

    def S_of(columns: slice, weights_K: torch.Tensor) -> Floats:
        S_B = (z_BK[:, columns] * weights_K).sum(dim=1)
        own = Ranges(*(of_all_GK[:, columns] for of_all_GK in ranges))
        S_B = sum_without_rounding(S_B, weights_K, group, own, precision_K[columns])
        return to_6_decimals(S_B.numpy())

    return S_of(slice(K), scaled_K), S_of(slice(K, None), torch.ones_like(scaled_K[:1]))


def tied_pairs(
    advantages: Sequence[npt.NDArray[Any]],
    values_BK: Floats,
    present_BK: Bools,
    weights_K: Floats,
    group_B: Ints,
) -> list[float | None]:
    """Return, for each estimator, the share of the pairs with different rewards that it ties.

    Two samples differ if a reward with a weight does, or if one of them lacks it. The share is None
    if there is no such pair. The time grows with the samples and with the largest group.

    Args:
        advantages: A_B of each estimator, rounded, so that equal numbers are equal advantages.
    """
    order = np.argsort(group_B, kind="stable")
    group_B, A_BE = group_B[order], [A_B[order] for A_B in advantages]
    used_K = weights_K != 0
    columns = [*values_BK[order][:, used_K].T, *present_BK[order][:, used_K].T]
    columns = [column for column in columns if column.min() < column.max()]
    different, tied_E = 0, [0] * len(A_BE)
    for apart in range(1, int(np.bincount(group_B).max())):  # two rows of the sorted batch
        differ = np.zeros(len(group_B) - apart, dtype=np.bool_)
        for column in columns:
            differ |= column[apart:] != column[:-apart]
        differ &= group_B[apart:] == group_B[:-apart]
        different += np.count_nonzero(differ)
        for e, A_B in enumerate(A_BE):
            tied_E[e] += np.count_nonzero(differ & (A_B[apart:] == A_B[:-apart]))
    return [tied / different if different else None for tied in tied_E]
