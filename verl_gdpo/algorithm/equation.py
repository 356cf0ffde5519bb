"""The GDPO advantage: normalise each reward in its group, sum with weights, normalise the batch.

Liu et al., "GDPO", arXiv 2601.05242. For B samples, K rewards, and the group g(i) of sample i:

    (1) group   z[i,k] = (r[i,k] - mean_g r[.,k]) / (std_g r[.,k] + eps)     per reward, per group
    (2) sum     S[i]   = sum_k w_k z[i,k]                                    or variants.py
    (3) batch   A[i]   = (S[i] - mean S) / (std S + eps)                     over the samples
    (4) tokens  A[i,t] = A[i] * response_mask[i,t]

Both std are unbiased (ddof 1). Shape suffixes: B samples, K rewards, G groups, T tokens.
This module knows tensors only: no text, no verl, no configuration.
"""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_gdpo.algorithm import equation_inputs as inputs
from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.zero import Ranges

Groups = tuple[Tensor, int]  # of `group_index`


class GdpoScalars(NamedTuple):
    """The results of steps 1 to 3, in float64 on the device of the rewards."""

    z_BK: Tensor  # step 1; K is 1 under group_norm="summed"
    S_B: Tensor  # step 2
    A_B: Tensor  # step 3


@torch.no_grad()
def compute_gdpo_advantage(
    rewards_BK: Any,
    group_ids: Any,
    response_mask_BT: Any,
    *,
    weights: Any = None,
    present_BK: Any = None,
    valid_B: Any = None,
    **options: Any,
) -> Tensor:
    """Return GDPO advantages per token.

    >>> rewards_BK = [[0, 0], [0, 1], [0, 0], [1, 1]]  # correct, short
    >>> mask_BT = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]
    >>> compute_gdpo_advantage(rewards_BK, ["p", "p", "q", "q"], mask_BT)
    tensor([[-0.5477, -0.5477, -0.0000],
            [ 0.5477,  0.5477,  0.5477],
            [-1.0954, -0.0000, -0.0000],
            [ 1.0954,  1.0954,  1.0954]])

    Args:
        rewards_BK: raw rewards, any scale (tensor, array or nested list).
        group_ids: B integers or strings; samples of one prompt share an id. Any order.
        response_mask_BT: non-zero on the tokens that are trained.
        weights: K factors on the *normalised* rewards. With None, each is 1.
        present_BK: False where a reward does not apply. It then contributes 0 and is left out of
            its group's statistics. With None, all rewards are present.
        valid_B: False for padding rows. They get 0 and enter no statistic. With None, rows with an
            all-zero mask count as padding. Pass it when you can: rejection in rollout correction
            also zeroes the masks of real samples, and those count.
        options: the fields of `Options`.

    Returns:
        advantages_BT: float32, on the mask's device, without gradient. All trained tokens of a
        sample have the same number, all other tokens have 0.

    A reward that is constant in a group contributes exactly 0 there. A group with a single sample
    has S = 0 and stays in the statistics of step 3. A sample that has no reward with a weight is
    left out of step 3, and its A is 0. S is set to exactly 0 where rewards cancel up to the
    rounding errors of the rewards and of step 1. Rewards in float32 are known to its precision;
    whole numbers up to 2^24, and a reward that varies alone in its group, exactly.

    Raises:
        ValueError: shapes disagree, a reward of a valid sample is NaN or infinite, an option has a
            wrong value, combine is given with group_norm="summed", or combine does not return B
            finite numbers.
        TypeError: an option is unknown, or group ids are neither all integers nor all strings.
    """
    mask_BT = inputs.where_it_is(response_mask_BT).bool()
    if mask_BT.ndim != 2:
        raise ValueError(
            f"response_mask_BT: expected shape (samples, tokens), got {tuple(mask_BT.shape)}"
        )
    scalars = compute_gdpo_scalars(
        inputs.reward_tensor(rewards_BK).to(mask_BT.device),
        group_ids,
        token_count_B=mask_BT.sum(dim=1),
        weights=weights,
        present_BK=present_BK,
        valid_B=mask_BT.any(dim=1) if valid_B is None else valid_B,
        **options,
    )
    return spread_over_tokens(scalars.A_B, mask_BT)


@torch.no_grad()
def spread_over_tokens(A_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Step 4: return advantages_BT, (B, T) float32, the mask times each sample's advantage.

    Args:
        mask_BT: 1 on tokens that are trained, 0 elsewhere; any dtype.
    """
    if mask_BT.device.type == "cpu":
        # numpy asks for huge pages and torch does not; page faults would dominate the time
        advantages_BT = torch.from_numpy(np.empty(mask_BT.shape, dtype=np.float32))
    else:
        advantages_BT = torch.empty(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
    # in place, because a product with the mask would first make a float copy of the mask
    return advantages_BT.copy_(mask_BT).mul_(A_B.to(advantages_BT)[:, None])


@torch.no_grad()
def compute_gdpo_scalars(
    rewards_BK: Any,
    group_ids: Any,
    *,
    token_count_B: Any = None,
    weights: Any = None,
    present_BK: Any = None,
    valid_B: Any = None,
    **options: Any,
) -> GdpoScalars:
    """Return z, S and A of each sample (steps 1 to 3); see `compute_gdpo_advantage`.

    Args:
        token_count_B: trained tokens per sample; only batch_norm="token" needs them.
        valid_B: with None, every row is a real sample.
    """
    chosen = inputs.Options(**options)
    rewards_BK = inputs.reward_tensor(rewards_BK)
    if rewards_BK.ndim != 2 or 0 in rewards_BK.shape:
        raise ValueError(
            f"rewards_BK: expected shape (samples, rewards), got {tuple(rewards_BK.shape)}"
        )
    B, K = rewards_BK.shape
    device = rewards_BK.device
    valid_B = inputs.row_mask("valid_B", valid_B, (B,), device)
    present_BK = inputs.row_mask("present_BK", present_BK, (B, K), device) & valid_B[:, None]
    weights_K = inputs.reward_weights(weights, K, device)
    counted_B = inputs.has_a_reward(present_BK, weights_K)
    arrived_as = rewards_BK.dtype
    rewards_BK = inputs.finite_rewards(rewards_BK, present_BK)
    precision_K = zero.precision_of(rewards_BK, arrived_as)
    groups = inputs.group_index(group_ids, B, device)
    if chosen.group_norm == "summed":
        rewards_BK = _centred_sum(rewards_BK, weights_K, valid_B, groups, precision_K)
        present_BK, precision_K = valid_B[:, None], zero.precision_of(rewards_BK, torch.float64)
        weights_K = weights_K.new_ones(1)

    z_BK, ranges = normalize_groups(
        rewards_BK, present_BK, *groups, eps=chosen.eps if chosen.normalize_by_std else None
    )
    if chosen.combine is None:
        S_B = (z_BK * weights_K).sum(dim=1)
    else:
        S_B = chosen.combine(z_BK, rewards_BK, groups[0], weights_K, present_BK, valid_B)
        S_B = torch.where(counted_B, _checked_sum(S_B, B), 0.0)
        # a variant may divide by a weight below 1; a reward of weight 0 leaves no rounding either
        weights_K = weights_K.abs().clamp(min=1.0) * (weights_K != 0)
    S_B = zero.sum_without_rounding(S_B, weights_K, groups[0], ranges, precision_K)
    if chosen.batch_norm == "none":
        return GdpoScalars(z_BK, S_B, S_B)
    count_B = counted_B
    if chosen.batch_norm == "token":
        if token_count_B is None:
            raise ValueError("batch_norm='token' needs token_count_B, the response lengths")
        count_B = count_B * torch.as_tensor(token_count_B, device=device)
    eps = chosen.eps if chosen.batch_eps is None else chosen.batch_eps
    return GdpoScalars(
        z_BK, S_B, _normalize_batch(S_B, count_B, counted_B, eps, chosen.batch_var_eps)
    )


def normalize_groups(
    rewards_BK: Tensor,
    present_BK: Tensor,
    group_B: Tensor,
    group_count: int,
    *,
    eps: float | None,
) -> tuple[Tensor, Ranges]:
    """Return z_BK, and the ranges of the rewards, which say how far rounding may have moved a z.

    Absent values have z = 0. A reward that is constant in a group has z = 0 there.

    Args:
        rewards_BK: float64, 0 where absent.
        eps: number added to the std. With None, z is not divided by the std.
    """
    sums = partial(inputs.group_sum, group_B=group_B, count=group_count)
    # a group with fewer than two values gives 0 / 0 below; the last `where` replaces it with 0
    there_BK = present_BK.to(torch.float64)
    count_GK = sums(there_BK)
    centred_BK = (rewards_BK - (sums(rewards_BK * there_BK) / count_GK)[group_B]) * there_BK

    def extremes(none: float, reduce: str) -> Tensor:
        index_BK = group_B[:, None].expand_as(rewards_BK)
        values_BK = rewards_BK.masked_fill(~present_BK, none)
        return torch.full_like(count_GK, none).scatter_reduce_(0, index_BK, values_BK, reduce)

    low_GK, high_GK = extremes(torch.inf, "amin"), extremes(-torch.inf, "amax")
    scale_GK = torch.ones_like(count_GK)
    if eps is not None:
        scale_GK = (sums(centred_BK.square()) / (count_GK - 1)).sqrt() + eps
        centred_BK = centred_BK / scale_GK[group_B]
    ranges = Ranges(count_GK, low_GK, high_GK, scale_GK)
    return torch.where(ranges.varies_GK[group_B] & present_BK, centred_BK, 0.0), ranges


def _centred_sum(
    rewards_BK: Tensor, weights_K: Tensor, valid_B: Tensor, groups: Groups, precision_K: Tensor
) -> Tensor:
    """Return the weighted sum of raw rewards minus its mean in the group, (B, 1).

    A missing reward adds 0. Each reward is centred before the sum, so that a constant sum of
    varying rewards is exactly 0.
    """
    valid_BK = valid_B[:, None].expand_as(rewards_BK)
    centred_BK, ranges = normalize_groups(rewards_BK, valid_BK, *groups, eps=None)
    sum_B = (centred_BK * weights_K).sum(dim=1)
    return zero.sum_without_rounding(sum_B, weights_K, groups[0], ranges, precision_K)[:, None]


def _checked_sum(S_B: Any, B: int) -> Tensor:
    """Return the result of a `combine` as float64, or raise ValueError if it cannot be used."""
    if not isinstance(S_B, Tensor) or S_B.shape != (B,):
        got = tuple(S_B.shape) if isinstance(S_B, Tensor) else type(S_B).__name__
        raise ValueError(f"combine: expected a tensor of shape ({B},), got {got}")
    if not torch.isfinite(S_B).all():
        row = int((~torch.isfinite(S_B)).nonzero()[0])
        raise ValueError(f"combine: S is {S_B[row].item()} in row {row}; expected a finite number")
    return S_B.to(torch.float64)


def _normalize_batch(
    S_B: Tensor, count_B: Tensor, counted_B: Tensor, eps: float, var_eps: float
) -> Tensor:
    """Return A_B (step 3), counting sample i `count_B[i]` times. A constant S gives exactly 0.

    A sample that is not in `counted_B` gets 0. One that is may have no tokens to count.
    """
    total = count_B.sum()
    low = S_B.masked_fill(count_B == 0, torch.inf).min()
    high = S_B.masked_fill(count_B == 0, -torch.inf).max()
    # complete groups sum to 0, so a mean that is only rounding must not move groups without signal
    mean = zero.mean_without_rounding((S_B * count_B).sum() / total, S_B)
    variance = ((S_B - mean).square() * count_B).sum() / (total - 1)
    A_B = (S_B - mean) / ((variance + var_eps).sqrt() + eps)
    return torch.where(counted_B & (high > low), A_B, 0.0)
