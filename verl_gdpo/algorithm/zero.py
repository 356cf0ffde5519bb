"""What counts as zero: a function for each question, and all tolerances of rewards and advantages.

Three things leave a small number where there should be none: float64, in which we compute; a scorer
that computed in float32; and eps, where rewards of different spread cancel. What only has to look
the same in a table is a fourth question. Shape suffixes: B samples, K rewards, G groups.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
WHOLE_IN_FLOAT32 = 2**24  # float32 holds all whole numbers up to this

NO_SIGNAL = 1e-8  # far below what eps leaves of a difference, and above what float32 leaves of none
RESIDUE = 1e-3  # of the summed absolute contributions; eps leaves about eps / std of rewards


class Ranges(NamedTuple):
    """The values of each reward in each group. Where there are none, low is inf and high -inf."""

    count_GK: Tensor
    low_GK: Tensor
    high_GK: Tensor
    scale_GK: Tensor  # what step 1 divided by; NaN with fewer than two values

    @property
    def varies_GK(self) -> Tensor:
        """Compares the values: the mean of equal numbers can differ from them by rounding."""
        return self.high_GK > self.low_GK


def group_sum(values_BK: Tensor, group_B: Tensor, G: int | None = None) -> Tensor:
    """Return the sums over each group, (G, K). With None, G is the highest number plus 1."""
    G = int(group_B.max()) + 1 if G is None else G
    return values_BK.new_zeros((G, values_BK.shape[1])).index_add_(0, group_B, values_BK)


# --- what is not there ----------------------------------------------------------------------------


def has_a_reward(present_BK: Any, weights_K: Any) -> Any:
    """Does a sample have a reward with a weight? Return a bool for each, of tensors or arrays.

    The others can say nothing about the policy, so step 3 leaves them out, as TRL does.
    """
    return (present_BK & (weights_K != 0)).any(1)


def has_tokens(mask_BT: Tensor) -> Tensor:
    """Does a row of this bool mask train any token? On bools, `any` takes 40 times as long."""
    bytes_BT = mask_BT.view(torch.uint8)
    return bytes_BT.amax(dim=1).bool() if mask_BT.shape[1] else mask_BT.any(dim=1)


# --- what float64 and the numbers of a scorer leave -----------------------------------------------


def precision_of(rewards_BK: Tensor, dtype: torch.dtype) -> Tensor:
    """How exactly is each reward known? Return precision_K, relative to its largest value.

    Rewards that arrive as float32 are known to float32, unless they are whole numbers, which it
    holds exactly. 16-bit rewards count as exact, because their rounding errors are as large as real
    differences.

    Args:
        rewards_BK: float64, 0 where absent.
        dtype: the number format in which they arrived.
    """
    exact_K = rewards_BK.new_full(rewards_BK.shape[1:], EPS64)
    if dtype != torch.float32:
        return exact_K
    is_whole_BK = (rewards_BK == rewards_BK.round()) & (rewards_BK.abs() <= WHOLE_IN_FLOAT32)
    return torch.where(is_whole_BK.all(dim=0), exact_K, EPS32)


def sum_without_rounding(
    S_B: Tensor, weights_K: Tensor, group_B: Tensor, ranges: Ranges, precision_K: Tensor
) -> Tensor:
    """Is S only what rounding left of rewards that cancel? Return S_B, exactly 0 where it is.

    Only what cancels can be rounding. So where one reward alone varies in a group, its values are
    taken at their word, whatever their format: two of them differ because the scorer meant it.
    `weights_K` may be (B, K).
    """
    varies_GK, weights_GK = ranges.varies_GK, weights_K.abs()
    if weights_K.ndim == 2:
        index_BK, none_GK = group_B[:, None].expand_as(weights_K), torch.zeros_like(ranges.low_GK)
        weights_GK = none_GK.scatter_reduce_(0, index_BK, weights_GK, "amax")
    cancels_G = (varies_GK & (weights_GK != 0)).sum(dim=1) > 1
    precision_GK = torch.where(cancels_G[:, None], precision_K, EPS64)
    # errors relative to the largest value: precision / 2 each for r and its mean, and EPS64 / 2
    # for each term of the sums over n values and over K rewards
    terms_GK = ranges.count_GK + weights_K.shape[-1]
    largest_GK = torch.maximum(ranges.high_GK, -ranges.low_GK)
    rounding_GK = (precision_GK + terms_GK * EPS64 / 2) * largest_GK
    # at most a quarter of the range, so that one varying reward alone never counts as rounding
    rounding_GK = torch.minimum(rounding_GK, (ranges.high_GK - ranges.low_GK) / 4)
    rounding_GK = torch.where(varies_GK, rounding_GK / ranges.scale_GK, 0.0)
    rounding_G = (rounding_GK * weights_GK).sum(dim=1)
    return torch.where(S_B.abs() <= rounding_G[group_B], 0.0, S_B)


def mean_without_rounding(mean: Tensor, S_B: Tensor) -> Tensor:
    """Is the mean of S the rounding error of a sum of B numbers? Return it, exactly 0 if it is."""
    return torch.where(mean.abs() <= EPS64 * len(S_B) * S_B.abs().max(), 0.0, mean)


def centred_without_rounding(centred_B: Floats, value_B: npt.NDArray[Any]) -> Floats:
    """Is a value minus its group's mean only rounding? Return centred_B, 0 where it is."""
    largest = np.abs(value_B).max(initial=0)
    return np.where(np.abs(centred_B) <= 1e-9 * largest, 0.0, centred_B)


def without_last_digits(values_BK: Floats) -> Floats:
    """Are two rewards, or sums of rewards, the same but for rounding? Then they become equal.

    Each reward is divided by its largest value and rounded to 1e-12. This is far above the error of
    a float64 sum (1e-15), and below any difference that a scorer means.
    """
    largest_K = np.abs(values_BK).max(axis=0)
    rounded_BK: Floats = np.round(values_BK / np.where(largest_K > 0, largest_K, 1.0), 12)
    return rounded_BK


# --- what a scorer in float32, and eps, leave -----------------------------------------------------


def is_0(values: Floats) -> Bools:
    """Is S, an advantage or a contribution what a scorer's float32 leaves of nothing?"""
    return np.abs(values) <= NO_SIGNAL


def or_0(values: Floats) -> Floats:
    """Return the values, exactly 0 where `is_0`."""
    return np.where(is_0(values), 0.0, values)


def has_signal(S_B: Floats, c_BK: Floats) -> Bools:
    """Is S more than rounding, and more than what eps leaves of contributions that cancel?"""
    enough_B: Bools = np.abs(S_B) > np.maximum(NO_SIGNAL, RESIDUE * np.abs(c_BK).sum(axis=1))
    return enough_B


def is_mean_0(mean: float, std: float) -> bool:
    """Is a mean of S, with this std, about 0? Else something moves groups without signal."""
    return abs(mean) <= max(NO_SIGNAL, 1e-6 * std)


def with_slack(bounds: tuple[float, float]) -> tuple[float, float, float]:
    """Is a reward at its bound, or outside? Return low, high, and by how much float32 may miss."""
    low, high = bounds
    return low, high, 1e-6 * (high - low)


def is_gain(gain: float, largest: float) -> bool:
    """Is a reward better than another by more than float32 leaves of numbers of this size?"""
    return gain > max(NO_SIGNAL, 1e-6 * largest)


def is_the_sum(score: Any, total: Any) -> Any:
    """Is a scorer's `score` the sum of its rewards? It may have added in float32."""
    return np.abs(score - total) <= 1e-5 * np.maximum(1.0, np.abs(total))


# --- what is shown, and compared with what was logged ---------------------------------------------

REPRODUCED = 1e-5  # a logged advantage, which is float32, differs from ours by no more
SAME_SHARE = 1e-6  # of the update; weights that keep shares are solved to `SOLVED`
SOLVED = 1e-12
SAME_STD = 1e-3  # of the step's std; smaller differences of two estimators can come from eps alone


def to_6_decimals(A_B: Floats) -> Floats:
    """Which advantages count as the same? Return equal numbers for them; -0.0 becomes 0.0."""
    rounded_B: Floats = A_B.round(6) + 0.0
    return rounded_B


def std_or_0(A_B: Floats) -> float:
    """Do advantages vary at all? Return their std (ddof 0), 0 for a constant that was float32."""
    std = float(A_B.std())
    return std if std > 1e-6 * np.abs(A_B).max() else 0.0


def is_apart(scaled_B: Floats) -> Bools:
    """Is a difference, or an advantage, in units of the step's std, one that estimators make?"""
    return np.abs(scaled_B) > SAME_STD
