"""Statistics of rewards and advantages as pure functions; `metrics.py` gives them names.

Shape suffixes: B samples, K rewards, G groups, numbered from 0. Samples are the rows that count.
`weights_K` may be (B, K).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.equation import normalize_groups
from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.rubrics import Terms
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.zero import Bools, Floats, Ints


def contributions(
    z_BK: Floats,
    S_B: Floats,
    values_BK: Floats,
    weights_K: Floats,
    group_B: Ints,
    settings: GdpoSettings,
) -> Floats:
    """Return c_BK, what each reward adds to S. The sum over the rewards is S.

    With group_norm="per_reward", c = w z. With "summed", c = w (r - mean_g r) / (std_g R + eps),
    where R is the weighted sum of the rewards, and a missing r is 0. In a group without signal
    std_g R is about 0, and dividing by eps would make these c dominate all others. So c is not
    divided there.
    """
    if settings.group_norm == "per_reward":
        return z_BK * weights_K
    size_G = np.bincount(group_B)
    total_GK = np.stack([np.bincount(group_B, column) for column in values_BK.T], axis=1)
    c_BK = weights_K * (values_BK - (total_GK / size_G[:, None])[group_B])
    if not settings.normalize_by_std:
        return c_BK
    square_G = np.bincount(group_B, c_BK.sum(axis=1) ** 2)
    scale_G = np.sqrt(square_G / np.maximum(size_G - 1, 1)) + settings.eps
    signal_G = np.bincount(group_B, ~zero.is_0(S_B)) > 0
    return c_BK / np.where(signal_G, scale_G, 1.0)[group_B, None]


def shares(c_BK: Floats, S_B: Floats) -> tuple[Floats | None, Floats | None]:
    """Return share_K and energy_K of each reward's contributions; None where nothing contributes.

    The share is cov(c, S) / var(S): the shares of all rewards add up to 1 where S is the sum of the
    contributions, and one below 0 pulls against the others. The energy is the share of the squared
    contributions, of which rewards that cancel have much.

    Args:
        c_BK: 0 in groups without a signal, as nothing says how to scale their contributions.
    """
    scale = np.abs(c_BK).max() or 1.0  # keeps the squares of small numbers above 0
    energy_K = ((c_BK / scale) ** 2).sum(axis=0)
    S_B = zero.or_0(S_B) / scale
    centred_B = S_B - S_B.mean()
    covariance_K, variance = (c_BK / scale).T @ centred_B, float(centred_B @ centred_B)
    share_K = covariance_K / variance if variance else None
    return share_K, energy_K / energy_K.sum() if energy_K.any() else None


def groups_with_signal(S_B: Floats, c_BK: Floats, group_B: Ints) -> Bools:
    """Return signal_G, True for the groups with a sample that has a signal."""
    return np.bincount(group_B, zero.has_signal(S_B, c_BK)) > 0


def within_groups(value_B: npt.NDArray[Any], group_B: Ints) -> Floats:
    """Return each value minus the mean of its group; what is only rounding becomes 0."""
    mean_G = np.bincount(group_B, value_B) / np.bincount(group_B).clip(min=1)
    return zero.centred_without_rounding(value_B - mean_G[group_B], value_B)


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
    K = values_BK.shape[1]
    # K + 1 columns, each in one piece of memory: numpy is slow at rows of few numbers
    with_sum_BK = np.vstack([values_BK.T, (values_BK * weights_K).sum(axis=1)]).T
    rewards_BK = torch.from_numpy(zero.without_last_digits(with_sum_BK))
    there_BK = torch.from_numpy(np.hstack([present_BK, np.ones_like(present_BK[:, :1])]))
    group = torch.from_numpy(group_B)
    z_BK, ranges = normalize_groups(rewards_BK, there_BK, group, int(group.max()) + 1, eps=0.0)
    precision_K = zero.precision_of(rewards_BK, rewards_BK.dtype)
    scaled_K = torch.from_numpy(weights_K / (np.abs(weights_K).max() or 1.0))

    def S_of(columns: slice, weights_K: torch.Tensor) -> Floats:
        S_B = (z_BK[:, columns] * weights_K).sum(dim=1)
        own = zero.Ranges(*(of_all_GK[:, columns] for of_all_GK in ranges))
        S_B = zero.sum_without_rounding(S_B, weights_K, group, own, precision_K[columns])
        return zero.to_6_decimals(S_B.numpy())

    return S_of(slice(K), scaled_K), S_of(slice(K, None), torch.ones(1, dtype=torch.float64))


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
    used_BK = present_BK & (weights_K != 0)
    columns = [*(values_BK * used_BK)[order].T, *used_BK[order].T]
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


def fold(values_BM: Floats | Bools, starts_K: Sequence[int]) -> Floats:
    """Return the sum over the terms of each reward, (B, K); see `Terms`."""
    return np.add.reduceat(values_BM, starts_K, axis=1, dtype=np.float64)


def terms_of_rows(terms: Terms, rows: Any) -> Terms:
    """Return those of some rows."""
    weights = terms.weights[rows] if terms.weights.ndim == 2 else terms.weights
    return Terms(terms.values_BM[rows], terms.present_BM[rows], weights, terms.starts_K)


def small_ranges(rewards: RewardMatrix, settings: GdpoSettings) -> list[str]:
    """Return a line on each reward whose range is a tenth or less of another's.

    GRPO lets rewards count by their ranges. Where a variant of gdpo does too, nothing is said.
    """
    counts_by_range = settings.group_norm == "summed" or not settings.normalize_by_std
    if counts_by_range or settings.combine:
        return []
    ranges = {k: size for k, size in rewards.ranges(settings).items() if rewards.weights[k]}
    other = max(ranges, key=ranges.__getitem__, default="")
    return [
        f"{name}: range {size:g}, a tenth or less of {other}'s {ranges[other]:g}. Under gdpo, with "
        "the same weight, it counts as much as the others; its range is no weight"
        for name, size in ranges.items()
        if 0 < size <= ranges[other] / 10
    ]


def mean_and_std(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> tuple[float, float]:
    """Return the mean and the std of S (ddof 1), counting sample i `count_B[i]` times."""
    count_B = np.ones(len(S_B)) if count_B is None else count_B
    mean = (S_B * count_B).sum() / max(count_B.sum(), 1)
    variance = ((S_B - mean) ** 2 * count_B).sum() / max(count_B.sum() - 1, 1)
    return float(mean), float(np.sqrt(variance))


def why_mean_is_not_0(S_B: Floats, c_BK: Floats, count_B: npt.NDArray[Any] | None) -> str | None:
    """Return why the mean of S is not 0 in this batch; None if it is about 0.

    In every group, the z of a reward sum to 0 over the samples that have it. So the weighted sum
    has the mean 0. There are three exceptions: samples do not count equally, S is not the weighted
    sum, or float64 has too few digits.
    """
    if _is_about_0(S_B, count_B):
        return None
    if _is_about_0(S_B):
        if count_B is not None and count_B.max() <= 1:
            return "group_norm=summed counts samples without any reward, and this step does not"
        return "batch_norm=token counts samples by their tokens, and S depends on the length"
    if _is_about_0(c_BK.sum(axis=1)):
        return "algorithm.gdpo.combine gives an S that is not 0 on average"
    return (
        "a reward is so large, compared with its spread within a group, that float64 cannot "
        "resolve it. Let the scorer subtract a typical value from it"
    )


def _is_about_0(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> bool:
    return zero.is_mean_0(*mean_and_std(S_B, count_B))
