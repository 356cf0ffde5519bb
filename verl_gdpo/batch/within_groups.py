"""What differs within groups of samples of one prompt.

Shape suffixes: B samples, K rewards, G groups, numbered from 0.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.advantage.zero import centred_without_rounding

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def within_groups(value_B: npt.NDArray[Any], group_B: Ints) -> Floats:
    """Return each value minus the mean of its group; what is only rounding becomes 0."""
    mean_G = np.bincount(group_B, value_B) / np.bincount(group_B).clip(min=1)
    return centred_without_rounding(value_B - mean_G[group_B], value_B)


def correlation(x_B: npt.NDArray[Any], y_B: npt.NDArray[Any]) -> float | None:
    """Return Pearson's correlation; None if one of the two is constant."""
    return of_units(unit(x_B), unit(y_B))


def unit(values: npt.NDArray[Any]) -> Floats | None:
    """Return the values less their mean, with length 1; None if they are constant."""
    if not len(values) or values.min() == values.max():
        return None
    centred = values - values.mean()
    centred = centred / np.abs(centred).max()  # keeps the squares of small numbers above 0
    result: Floats = centred / np.linalg.norm(centred)
    return result


def of_units(x_B: Floats | None, y_B: Floats | None) -> float | None:
    """Return the correlation of two results of `unit`."""
    return None if x_B is None or y_B is None else float(np.clip(x_B @ y_B, -1, 1))
