"""What differs within groups of samples of one prompt.

Shape suffixes: B samples, K rewards, G groups, numbered from 0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

CENTRED_ROUNDING = 1e-9  # of the largest value


def within_groups(value_B: npt.NDArray[Any], group_B: Ints) -> Floats:
    """Return each value minus the mean of its group; what is only rounding becomes 0."""
    mean_G = np.bincount(group_B, value_B) / np.bincount(group_B).clip(min=1)
    centred_B: Floats = value_B - mean_G[group_B]
    centred_B[np.abs(centred_B) <= CENTRED_ROUNDING * np.abs(value_B).max(initial=0)] = 0
    return centred_B


def correlation(x_B: npt.NDArray[Any], y_B: npt.NDArray[Any]) -> float | None:
    """Return Pearson's correlation; None if one of the two is constant."""
    units = []
    for values in (x_B, y_B):
        if not len(values) or values.min() == values.max():
            return None
        centred = values - values.mean()
        centred = centred / np.abs(centred).max()  # keeps the squares of small numbers above 0
        units.append(centred / np.linalg.norm(centred))
    return float(np.clip(units[0] @ units[1], -1, 1))


def group_max(values: Floats, group: Ints, group_count: int) -> Floats:
    """Return the largest value of each group, -inf for a group without values."""
    highest_G = np.full(group_count, -np.inf)
    np.maximum.at(highest_G, group, values)
    return highest_G
