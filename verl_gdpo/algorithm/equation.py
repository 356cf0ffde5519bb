"""The GDPO advantage: normalise each reward in its group, sum with weights, normalise the batch.

Liu et al., "GDPO", arXiv 2601.05242. For B samples, K rewards, and the group g(i) of sample i:

    (1) group   z[i,k] = (r[i,k] - mean_g r[.,k]) / (std_g r[.,k] + eps)     per reward, per group
    (2) sum     S[i]   = sum_k w_k z[i,k]                                    or variants.py
    (3) batch   A[i]   = (S[i] - mean S) / (std S + eps)                     over the samples
    (4) tokens  A[i,t] = A[i] * response_mask[i,t]

Both std are unbiased (ddof 1). Shape suffixes: B samples, K rewards, G groups, T tokens.
This module knows tensors only: no text, no verl, no configuration of a run.
"""

from collections import defaultdict
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.settings import Options
from verl_gdpo.algorithm.values import LARGEST
from verl_gdpo.algorithm.variants import Combine, checked_sum
from verl_gdpo.algorithm.zero import Ranges, group_sum

Groups = tuple[Tensor, int]  # of `group_index`


class GdpoScalars(NamedTuple):
    """The results of steps 1 to 3, in float64 on the device of the rewards."""

    z_BK: Tensor  # step 1; K is 1 under group_norm="summed"
    S_B: Tensor  # step 2
    A_B: Tensor  # step 3


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
    combine: Combine | None = None,
    **options: Any,
) -> GdpoScalars:
    """Return z, S and A of each sample (steps 1 to 3).

    Args:
        token_count_B: trained tokens per sample; only batch_norm="token" needs them.
        weights: K factors on the *normalised* rewards, or (B, K), equal within a group. With None,
            each is 1.
        present_BK: False where a reward does not apply. It then contributes 0 and is left out of
            its group's statistics. With None, all rewards are present.
        valid_B: False for padding rows. With None, every row is a real sample.
        combine: function that replaces the weighted sum of step 2; see `variants`.
        options: the fields of `Options`.

    A reward that is constant in a group contributes exactly 0 there. A group with a single sample
    has S = 0 and stays in the statistics of step 3. A sample that has no reward with a weight is
    left out of step 3, and its A is 0. S is set to exactly 0 where rewards cancel up to the
    rounding errors of the rewards and of step 1; see `zero.sum_without_rounding`.

    Raises:
        ValueError: shapes disagree, a reward of a valid sample is NaN or infinite, an option is
            unknown or has a wrong value, or combine does not return B finite numbers.
        TypeError: group ids are neither all integers nor all strings.
    """
    chosen = Options(**options)
    if combine is not None and chosen.group_norm == "summed":
        raise ValueError("combine needs group_norm='per_reward': 'summed' adds the rewards first")
    rewards_BK = as_tensor(rewards_BK)
    if rewards_BK.ndim != 2 or 0 in rewards_BK.shape:
        raise ValueError(
            f"rewards_BK: expected shape (samples, rewards), got {tuple(rewards_BK.shape)}"
        )
    (B, K), device, arrived_as = rewards_BK.shape, rewards_BK.device, rewards_BK.dtype
    valid_B = _mask("valid_B", valid_B, (B,), device)
    present_BK = _mask("present_BK", present_BK, (B, K), device) & valid_B[:, None]
    weights_K = _weights(weights, (B, K), device)
    if combine is not None and weights_K.ndim == 2:
        raise ValueError("combine needs the same weights for all samples")
    counted_B = zero.has_a_reward(present_BK, weights_K)
    rewards_BK = _finite(rewards_BK, present_BK)
    precision_K = zero.precision_of(rewards_BK, arrived_as)
    groups = group_index(group_ids, B, device)
    if chosen.group_norm == "summed":
        rewards_BK = _centred_sum(rewards_BK, weights_K, valid_B, groups, precision_K)
        present_BK, precision_K = valid_B[:, None], zero.precision_of(rewards_BK, torch.float64)
        weights_K = weights_K.new_ones(1)

    eps = chosen.eps if chosen.normalize_by_std else None
    z_BK, ranges = normalize_groups(rewards_BK, present_BK, *groups, eps=eps)
    if combine is None:
        S_B = (z_BK * weights_K).sum(dim=1)
    else:
        S_B = combine(z_BK, rewards_BK, groups[0], weights_K, present_BK, valid_B)
        S_B = torch.where(counted_B, checked_sum(S_B, B), 0.0)
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
    A_B = _normalize_batch(S_B, count_B, counted_B, chosen)
    return GdpoScalars(z_BK, S_B, A_B)


def normalize_groups(
    rewards_BK: Tensor, present_BK: Tensor, group_B: Tensor, G: int, *, eps: float | None
) -> tuple[Tensor, Ranges]:
    """Step 1: return z_BK, and the ranges of the rewards, which say how far rounding moves a z.

    A missing reward has z = 0, and counts in no statistic of its group. A reward that is constant
    in a group has z = 0 there.

    Args:
        rewards_BK: float64, 0 where missing.
        eps: number added to the std. With None, z is not divided by the std.
    """
    sums = partial(group_sum, group_B=group_B, G=G)
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


def _normalize_batch(S_B: Tensor, count_B: Tensor, counted_B: Tensor, chosen: Options) -> Tensor:
    """Step 3: return A_B, counting sample i `count_B[i]` times. A constant S gives exactly 0.

    A sample that is not in `counted_B` gets 0. One that is may have no tokens to count.
    """
    total = count_B.sum()
    low = S_B.masked_fill(count_B == 0, torch.inf).min()
    high = S_B.masked_fill(count_B == 0, -torch.inf).max()
    # complete groups sum to 0, so a mean that is only rounding must not move groups without signal
    mean = zero.mean_without_rounding((S_B * count_B).sum() / total, S_B)
    variance = ((S_B - mean).square() * count_B).sum() / (total - 1)
    eps = chosen.eps if chosen.batch_eps is None else chosen.batch_eps
    A_B = (S_B - mean) / ((variance + chosen.batch_var_eps).sqrt() + eps)
    return torch.where(counted_B & (high > low), A_B, 0.0)


# --- what the caller passes, checked and made tensors ---------------------------------------------


def group_index(group_ids: Any, B: int, device: torch.device) -> Groups:
    """Return the group number of each sample, (B,) int64 from 0, and the number of groups."""
    ids = group_ids.tolist() if isinstance(group_ids, Tensor | np.ndarray) else list(group_ids)
    if len(ids) != B:
        raise ValueError(f"group_ids: expected {B}, one per row of rewards_BK, got {len(ids)}")
    kinds = set(map(type, ids))
    # bools are refused: they are probably the result of a comparison passed by mistake
    integers = all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)
    if not integers and not all(issubclass(kind, str) for kind in kinds):
        names = sorted(kind.__name__ for kind in kinds)
        raise TypeError(f"group_ids: expected all integers or all strings, got {names}")
    number: dict[Any, int] = defaultdict(count().__next__)
    index = np.fromiter(map(number.__getitem__, ids), dtype=np.int64)
    return torch.from_numpy(index).to(device), len(number)


def as_tensor(values: Any) -> Tensor:
    """Return values as a tensor: arrays keep their dtype, and a tensor also keeps its device."""
    if isinstance(values, Tensor):
        return values
    dtype = None if isinstance(values, np.ndarray) else torch.float64
    return torch.as_tensor(values, dtype=dtype)


def _finite(rewards_BK: Tensor, present_BK: Tensor) -> Tensor:
    """Return rewards in float64, 0 where missing; raise ValueError for NaN, inf or too large."""
    rewards_BK = rewards_BK.to(torch.float64)
    bad_BK = ~(rewards_BK.abs() <= LARGEST) & present_BK
    if bad_BK.any():
        row, column = (int(i) for i in bad_BK.nonzero()[0])
        raise ValueError(
            f"rewards_BK[{row}, {column}] is {rewards_BK[row, column].item()}; expected a finite "
            f"number up to {LARGEST:g} (mark rewards that do not apply with present_BK, padding "
            "with valid_B)"
        )
    return torch.where(present_BK, rewards_BK, 0.0)


def _weights(weights: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return weights_K or weights_BK in float64, all 1 for None; raise ValueError for others."""
    weights = [1.0] * shape[1] if weights is None else weights
    weights_K = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if weights_K.shape not in (shape[1:], shape) or not (weights_K.abs() <= LARGEST).all():
        raise ValueError(
            f"weights: expected {shape[1]} finite numbers up to {LARGEST:g}, got "
            f"{weights_K.tolist()}"
        )
    return weights_K


def _mask(name: str, mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the mask as a bool tensor, all True for None; raise ValueError for another shape."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    tensor = torch.as_tensor(mask, device=device)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return tensor.to(torch.bool)
