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

EPS32 = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps
# float32 holds all whole numbers up to this one.
WHOLE_IN_FLOAT32 = 2**24

# This is far below what eps leaves of a difference, and above what float32 leaves of none.
NO_SIGNAL = 1e-8
# This is a share of the summed absolute contributions. eps leaves about eps / std of rewards.
RESIDUE = 1e-3


class Ranges(NamedTuple):
    """The values of each reward in each group. Where there are none, low is inf and high -inf."""

    count_GK: Tensor
    low_GK: Tensor
    high_GK: Tensor
    scale_GK: Tensor  # Step 1 divided by it. It is NaN where there are fewer than two values.

    @property
    def varies_GK(self) -> Tensor:
        """Compares the values: the mean of equal numbers can differ from them by rounding."""
        return self.high_GK > self.low_GK


def group_sum(values_BK: Tensor, group_B: Tensor, G: int | None = None) -> Tensor:
    """Return the sums over each group, (G, K). With None, G is the highest number plus 1."""
    if G is None:
        G = int(group_B.max()) + 1
    sums_GK = values_BK.new_zeros((G, values_BK.shape[1]))
    return sums_GK.index_add_(0, group_B, values_BK)


def group_min(values_BK: Tensor, group_B: Tensor, G: int) -> Tensor:
    """Return the lowest value in each group, (G, K); inf in a group without a row."""
    lowest_GK = values_BK.new_full((G, values_BK.shape[1]), torch.inf)
    return lowest_GK.scatter_reduce_(0, _group_of_each(group_B, values_BK), values_BK, "amin")


def group_max(values_BK: Tensor, group_B: Tensor, G: int) -> Tensor:
    """Return the highest value in each group, (G, K); -inf in a group without a row."""
    highest_GK = values_BK.new_full((G, values_BK.shape[1]), -torch.inf)
    return highest_GK.scatter_reduce_(0, _group_of_each(group_B, values_BK), values_BK, "amax")


def _group_of_each(group_B: Tensor, values_BK: Tensor) -> Tensor:
    """Return the group of each value, (B, K), which `scatter_reduce_` wants; it takes no memory."""
    return group_B[:, None].expand_as(values_BK)


# --- what is not there ----------------------------------------------------------------------------


def has_a_reward(present_BK: Any, weights_K: Any) -> Any:
    """Does a sample have a reward with a weight? Return a bool for each, of tensors or arrays.

    The others can say nothing about the policy, so step 3 leaves them out, as TRL does.
    """
    return (present_BK & (weights_K != 0)).any(1)


def has_tokens(mask_BT: Tensor) -> Tensor:
    """Does a row of this bool mask train any token? On bools, `any` takes 40 times as long."""
    if mask_BT.shape[1] == 0:
        # There is no largest of no numbers.
        return mask_BT.any(dim=1)
    bytes_BT = mask_BT.view(torch.uint8)
    return bytes_BT.amax(dim=1).bool()


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
    varies_GK = ranges.varies_GK
    weights_GK = weights_K.abs()
    if weights_K.ndim == 2:
        weights_GK = group_max(weights_GK, group_B, len(varies_GK))

    number_that_vary_G = (varies_GK & (weights_GK != 0)).sum(dim=1)
    may_cancel_G = number_that_vary_G > 1
    precision_GK = torch.where(may_cancel_G[:, None], precision_K, EPS64)
    # Relative to the largest value, r and its mean are wrong by half of the precision each. Each
    # term of the sums, over the n values of a group and over K rewards, adds half of EPS64.
    terms_GK = ranges.count_GK + weights_K.shape[-1]
    largest_GK = torch.maximum(ranges.high_GK, -ranges.low_GK)
    error_GK = (precision_GK + terms_GK * EPS64 / 2) * largest_GK
    # At most a quarter of the range, so that one varying reward alone never counts as rounding.
    quarter_GK = (ranges.high_GK - ranges.low_GK) / 4
    limited_GK = torch.minimum(error_GK, quarter_GK)
    # Step 1 has divided the error too. A reward that does not vary has an exact z of 0.
    error_of_z_GK = torch.where(varies_GK, limited_GK / ranges.scale_GK, 0.0)
    error_of_S_G = (error_of_z_GK * weights_GK).sum(dim=1)
    is_rounding_B = S_B.abs() <= error_of_S_G[group_B]
    return torch.where(is_rounding_B, 0.0, S_B)


def mean_without_rounding(mean: Tensor, S_B: Tensor) -> Tensor:
    """Is the mean of S the rounding error of a sum of B numbers? Return it, exactly 0 if it is."""
    rounding = EPS64 * len(S_B) * S_B.abs().max()
    return torch.where(mean.abs() <= rounding, 0.0, mean)


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
    # A reward that is 0 everywhere stays 0, whatever divides it.
    unit_K = np.where(largest_K > 0, largest_K, 1.0)
    rounded_BK: Floats = np.round(values_BK / unit_K, 12)
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
    residue_B = RESIDUE * np.abs(c_BK).sum(axis=1)
    enough_B: Bools = np.abs(S_B) > np.maximum(NO_SIGNAL, residue_B)
    return enough_B


def is_mean_0(mean: float, std: float) -> bool:
    """Is a mean of S, with this std, about 0? Else something moves groups without signal."""
    return abs(mean) <= max(NO_SIGNAL, 1e-6 * std)


def with_slack(bounds: tuple[float, float]) -> tuple[float, float, float]:
    """Is a reward at its bound, or outside? Return low, high, and by how much float32 may miss."""
    low, high = bounds
    slack = 1e-6 * (high - low)
    return low, high, slack


def is_outside(mean_G: Floats, low: float, high: float) -> Bools:
    """Is the mean of a reward outside of a range? That of three times 0.1 is not above 0.1."""
    slack = 1e-6 * max(abs(low), abs(high))
    outside_G: Bools = (mean_G < low - slack) | (mean_G > high + slack)
    return outside_G


def is_at_least(value: Any, least: float) -> Any:
    """Is a reward at least this high? 9 of 10 are 0.89999998 in float32, and six sixths below 1."""
    return value >= least - 1e-6 * abs(least)


def is_gain(gain: float, largest: float) -> bool:
    """Is a reward better than another by more than float32 leaves of numbers of this size?"""
    return gain > max(NO_SIGNAL, 1e-6 * largest)


def is_the_sum(score: Any, total: Any) -> Any:
    """Is a scorer's `score` the sum of its rewards? It may have added in float32."""
    return np.abs(score - total) <= 1e-5 * np.maximum(1.0, np.abs(total))


# --- what is shown, and compared with what was logged ---------------------------------------------

# A logged advantage, which is float32, differs from ours by no more.
REPRODUCED = 1e-5
# Two shares of the update that differ by no more are the same.
SAME_SHARE = 1e-6
# Weights that keep the shares are solved to this, far below the comparison above.
SOLVED = 1e-12
# This is a share of the step's std. Smaller differences of two estimators can come from eps alone.
SAME_STD = 1e-3


def to_6_decimals(A_B: Floats) -> Floats:
    """Which advantages count as the same? Return equal numbers for them; -0.0 becomes 0.0."""
    # Adding 0 makes 0.0 of -0.0.
    rounded_B: Floats = A_B.round(6) + 0.0
    return rounded_B


def std_or_0(A_B: Floats) -> float:
    """Do advantages vary at all? Return their std (ddof 0), 0 for a constant that was float32."""
    std = float(A_B.std())
    if std > 1e-6 * np.abs(A_B).max():
        return std
    return 0.0


def is_apart(scaled_B: Floats) -> Bools:
    """Is a difference, or an advantage, in units of the step's std, one that estimators make?"""
    return np.abs(scaled_B) > SAME_STD
