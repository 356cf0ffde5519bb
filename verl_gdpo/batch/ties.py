"""Pairs of samples of a group that differ in their rewards and get one advantage.

Shape suffixes: B samples, K rewards.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def kinds(
    values_BK: npt.NDArray[Any], present_BK: npt.NDArray[Any], weights_K: npt.NDArray[Any]
) -> Ints:
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
