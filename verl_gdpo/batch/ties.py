"""Pairs of samples of a group that differ in their rewards and get one advantage.

Shape suffixes: B samples, K rewards.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def tied_pairs(advantage_B: npt.NDArray[Any], rewards_BK: Any, group_B: Ints) -> float | None:
    """Return their share of the pairs with different rewards; None if there is no such pair.

    Args:
        advantage_B: rounded, so that equal numbers are equal advantages.
        rewards_BK: the rewards that count, beside whether they are present.
    """
    number_B = np.unique(advantage_B, return_inverse=True)[1]
    kind_B = np.unique(rewards_BK, axis=0, return_inverse=True)[1].reshape(-1)
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
