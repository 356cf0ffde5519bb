"""Pairs of samples of a group that differ in their rewards and get one advantage.

Shape suffixes: B samples, K rewards.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.advantage.equation import GroupNorm, compute_gdpo_scalars
from verl_gdpo.batch.within_groups import Bools, Floats, Ints


def advantages_without_eps(
    values_BK: Floats, weights_K: Floats, present_BK: Bools, group_B: Ints, group_norm: GroupNorm
) -> Floats:
    """Return S with eps=0, rounded, so that advantages that are the same are equal numbers.

    eps must be 0 because it makes the rewards (0, 1) and (0, 2) different in GRPO. Without eps, a
    rounding error of the input would become an advantage. So each reward, or the sum, is rounded to
    1e-12 of its largest value: this is far above the error of a float64 sum (1e-15), and below any
    difference that a scorer means. If rewards spread over 1 % of their size, advantages are then
    right to about 1e-10; they count as equal if 6 decimals agree. Step 3 only scales, so it is left
    out.
    """
    if group_norm == "summed":
        values_BK = (values_BK @ weights_K)[:, None]
        weights_K, present_BK = np.ones(1), np.ones_like(present_BK[:, :1])
    largest_K = np.abs(values_BK).max(axis=0)
    values_BK = np.round(values_BK / np.where(largest_K > 0, largest_K, 1.0), 12)
    S_B = compute_gdpo_scalars(
        values_BK,
        group_B,
        weights=weights_K / (np.abs(weights_K).max() or 1.0),
        present_BK=present_BK,
        batch_norm="none",
        eps=0.0,
    ).S_B
    rounded_B: Floats = S_B.numpy().round(6) + 0.0  # -0.0 becomes 0.0
    return rounded_B


def kinds(values_BK: npt.NDArray[Any], present_BK: Bools, weights_K: npt.NDArray[Any]) -> Ints:
    """Return a number for each sample; it is the same where all rewards with a weight are."""
    used_K = weights_K != 0
    kind_B = np.zeros(len(values_BK), dtype=np.int64)
    for column_B in (*values_BK[:, used_K].T, *present_BK[:, used_K].T):
        number_B = np.unique(column_B, return_inverse=True)[1]
        pair_B = kind_B * (int(number_B.max(initial=0)) + 1) + number_B
        kind_B = np.unique(pair_B, return_inverse=True)[1]  # again small, so that none overflows
    return kind_B


def tied_pairs(advantage_B: npt.NDArray[Any], kind_B: Ints, group_B: Ints) -> float | None:
    """Return their share of the pairs with different rewards; None if there is no such pair.

    Args:
        advantage_B: rounded, so that equal numbers are equal advantages.
        kind_B: of `kinds`.
    """
    number_B = np.unique(advantage_B, return_inverse=True)[1]
    different = _pairs(group_B) - _pairs(group_B, kind_B)
    tied = _pairs(group_B, number_B) - _pairs(group_B, number_B, kind_B)
    return tied / different if different else None


def _pairs(*index: Ints) -> int:
    """Return the number of pairs of rows that agree in every index."""
    key_B = index[0]
    for other_B in index[1:]:
        key_B = key_B * (int(other_B.max()) + 1) + other_B
    counts = np.unique(key_B, return_counts=True)[1]
    return int((counts * (counts - 1) // 2).sum())
