"""The GDPO advantage: normalise each reward in its group, sum with weights, normalise the batch.

Liu et al., "GDPO", arXiv 2601.05242. For B samples, K rewards, and the group g(i) of sample i:

    (1) group   z[i,k] = (r[i,k] - mean_g r[.,k]) / (std_g r[.,k] + eps)     per reward, per group
    (2) sum     S[i]   = sum_k w_k z[i,k]                                    or variants.py
    (3) batch   A[i]   = (S[i] - mean S) / (std S + eps)                     over the samples
    (4) tokens  A[i,t] = A[i] * response_mask[i,t]

Both std are unbiased (ddof 1). Shape suffixes: B samples, K rewards, G groups, T tokens.
`plain_gdpo` is steps 1 to 3 as one would write them on a blackboard. `compute_gdpo_scalars` takes
the same steps, also for rewards that are missing, constant or cancel, for padding, and for GRPO.
This module knows tensors only: no text, no verl, no configuration of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.settings import PAPER_EPS, Options, read_options
from verl_gdpo.algorithm.values import LARGEST
from verl_gdpo.algorithm.variants import Combine, checked_sum
from verl_gdpo.algorithm.zero import Ranges, group_max, group_min, group_sum

# torch's sum first makes 8 bytes of each token. A step may have 65 million tokens, so that what is
# counted or added over tokens is done for some rows (R) at a time.
ROWS_AT_ONCE = 256


def plain_gdpo(
    rewards_BK: Tensor, group_B: Tensor, weights_K: Tensor, eps: float = PAPER_EPS
) -> Tensor:
    """GDPO as in the paper: return A_B. It is here to be read, and nothing else calls it.

    It wants groups of two samples or more, all rewards present and no padding. A test holds it
    equal to `compute_gdpo_scalars` on such batches.
    """
    z_BK = torch.empty_like(rewards_BK)
    for group in set(group_B.tolist()):
        rows = group_B == group
        r = rewards_BK[rows]
        z_BK[rows] = (r - r.mean(dim=0)) / (r.std(dim=0) + eps)  # step 1
    S_B = (weights_K * z_BK).sum(dim=1)  # step 2
    A_B = (S_B - S_B.mean()) / (S_B.std() + eps)  # step 3
    return A_B


class GdpoScalars(NamedTuple):
    """The results of steps 1 to 3, in float64 on the device of the rewards."""

    z_BK: Tensor  # The result of step 1; K is 1 under group_norm="summed".
    S_B: Tensor  # The result of step 2.
    A_B: Tensor  # The result of step 3.


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
    names: Sequence[str] | None = None,
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
        names: of the K rewards, for messages.
        options: the fields of `Options`.

    A reward that is constant in a group contributes exactly 0 there. A group with a single sample
    has S = 0 and stays in the statistics of step 3. A sample that has no reward with a weight is
    left out of step 3, and its A is 0; but group_norm="summed" takes it for a sum of 0, as GRPO
    does. S is set to exactly 0 where rewards cancel up to the rounding errors of the rewards and of
    step 1; see `zero.sum_without_rounding`.

    Raises:
        ValueError: shapes disagree, a reward of a valid sample is NaN or infinite, an option is
            unknown or has a wrong value, or combine does not return B finite numbers.
        TypeError: group ids are neither all integers nor all strings.
    """
    method = read_options(options)
    batch = check_inputs(
        rewards_BK,
        group_ids,
        token_count_B=token_count_B,
        weights=weights,
        present_BK=present_BK,
        valid_B=valid_B,
        combine=combine,
        method=method,
        names=names,
    )
    if method.group_norm == "summed":
        # GRPO adds the rewards before it normalises them, so there is one reward from here on.
        batch = with_summed_rewards(batch)

    std_eps = None
    if method.normalize_by_std:
        std_eps = method.eps
    z_BK, ranges = normalize_groups(
        batch.rewards_BK, batch.present_BK, batch.group_B, batch.G, eps=std_eps
    )
    S_B = sum_rewards(z_BK, ranges, batch, combine)
    A_B = normalize_batch(S_B, batch, method)
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
    # A group with fewer than two values gives 0 / 0 below. The last `where` replaces it with 0.
    there_BK = present_BK.to(torch.float64)
    count_GK = group_sum(there_BK, group_B, G)
    mean_GK = group_sum(rewards_BK * there_BK, group_B, G) / count_GK
    centred_BK = (rewards_BK - mean_GK[group_B]) * there_BK
    if eps is None:
        scale_GK = torch.ones_like(count_GK)
    else:
        variance_GK = group_sum(centred_BK.square(), group_B, G) / (count_GK - 1)
        scale_GK = variance_GK.sqrt() + eps

    low_GK = group_min(rewards_BK.masked_fill(~present_BK, torch.inf), group_B, G)
    high_GK = group_max(rewards_BK.masked_fill(~present_BK, -torch.inf), group_B, G)
    ranges = Ranges(count_GK, low_GK, high_GK, scale_GK)
    # The mean of equal numbers can differ from them by rounding, and eps may be 0. So a constant
    # reward is told by its range, and never by a small std.
    has_z_BK = ranges.varies_GK[group_B] & present_BK
    z_BK = torch.where(has_z_BK, centred_BK / scale_GK[group_B], 0.0)
    return z_BK, ranges


def sum_rewards(z_BK: Tensor, ranges: Ranges, batch: "Batch", combine: Combine | None) -> Tensor:
    """Step 2: return S_B, the weighted sum of z or what `combine` makes of z; 0 for rounding."""
    if combine is None:
        weighted_sum_B = (z_BK * batch.weights_K).sum(dim=1)
        return zero.sum_without_rounding(
            weighted_sum_B, batch.weights_K, batch.group_B, ranges, batch.precision_K
        )
    combined_B = combine(
        z_BK, batch.rewards_BK, batch.group_B, batch.weights_K, batch.present_BK, batch.valid_B
    )
    checked_B = checked_sum(combined_B, len(z_BK))
    # A variant may give samples without a reward, such as padding, an S of their own.
    counted_S_B = torch.where(batch.counted_B, checked_B, 0.0)
    # A variant may divide by a weight below 1, and what rounding left of z grows with it. A reward
    # of weight 0 leaves no rounding in a variant either.
    amplified_K = batch.weights_K.abs().clamp(min=1.0) * (batch.weights_K != 0)
    return zero.sum_without_rounding(
        counted_S_B, amplified_K, batch.group_B, ranges, batch.precision_K
    )


def normalize_batch(S_B: Tensor, batch: "Batch", method: Options) -> Tensor:
    """Step 3: return A_B, counting sample i `batch.times_B[i]` times. A constant S gives exactly 0.

    A sample that is not in `batch.counted_B` gets 0. One that is may have no tokens to count.
    """
    if method.batch_norm == "none":
        return S_B
    times_B = batch.times_B
    total = times_B.sum()
    # Complete groups sum to 0, so a mean that is only rounding must not move groups without signal.
    mean = zero.mean_without_rounding((S_B * times_B).sum() / total, S_B)
    variance = ((S_B - mean).square() * times_B).sum() / (total - 1)
    std = (variance + method.batch_var_eps).sqrt()
    eps = method.eps
    if method.batch_eps is not None:
        eps = method.batch_eps
    normalized_B = (S_B - mean) / (std + eps)

    low = S_B.masked_fill(times_B == 0, torch.inf).min()
    high = S_B.masked_fill(times_B == 0, -torch.inf).max()
    return torch.where(batch.counted_B & (high > low), normalized_B, 0.0)


@torch.no_grad()
def spread_over_tokens(A_B: Tensor, mask_BT: Tensor) -> Tensor:
    """Step 4: return advantages_BT, (B, T) float32, the mask times each sample's advantage.

    Args:
        mask_BT: 1 on tokens that are trained, 0 elsewhere; any dtype.
    """
    if mask_BT.device.type == "cpu":
        # numpy asks for huge pages and torch does not, and page faults would dominate the time.
        advantages_BT = torch.from_numpy(np.empty(mask_BT.shape, dtype=np.float32))
    else:
        advantages_BT = torch.empty(mask_BT.shape, dtype=torch.float32, device=mask_BT.device)
    # All of it is in place, because a product with the mask would first make a float copy of it.
    advantages_BT.copy_(mask_BT)
    advantages_BT.mul_(A_B.to(advantages_BT)[:, None])
    return advantages_BT


@torch.no_grad()
def count_tokens(mask_BT: Tensor) -> Tensor:
    """Return how many tokens of each row the mask marks, (B,) int64, whatever number marks them."""
    counts = []
    for mask_RT in torch.split(mask_BT, ROWS_AT_ONCE):
        counts.append((mask_RT != 0).sum(dim=1))
    return torch.cat(counts)


# --- the inputs of the steps ----------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """What a caller passed, checked, as tensors on the device of the rewards."""

    rewards_BK: Tensor  # In float64, 0 where missing and on padding.
    present_BK: Tensor  # False where a reward is missing, and on padding.
    valid_B: Tensor  # False on padding.
    group_B: Tensor  # The number of the sample's group, int64 from 0.
    G: int
    weights_K: Tensor  # In float64; (B, K) where groups have weights of their own.
    precision_K: Tensor  # How exactly each reward is known; see `zero.precision_of`.
    counted_B: Tensor  # Whether a sample has a reward with a weight, and is part of step 3.
    times_B: Tensor  # How many times step 3 counts a sample: once, or once for each of its tokens.


def check_inputs(
    rewards_BK: Any,
    group_ids: Any,
    *,
    token_count_B: Any,
    weights: Any,
    present_BK: Any,
    valid_B: Any,
    combine: Combine | None,
    method: Options,
    names: Sequence[str] | None = None,
) -> Batch:
    """Return the arguments of `compute_gdpo_scalars` as a `Batch`, or raise what it raises."""
    if combine is not None and method.group_norm == "summed":
        raise ValueError("combine needs group_norm='per_reward': 'summed' adds the rewards first")
    given_BK = as_tensor(rewards_BK)
    if given_BK.ndim != 2 or 0 in given_BK.shape:
        raise ValueError(
            f"rewards_BK: expected shape (samples, rewards), got {tuple(given_BK.shape)}"
        )
    B, K = given_BK.shape
    device = given_BK.device

    real_B = _mask("valid_B", valid_B, (B,), device)
    there_BK = _mask("present_BK", present_BK, (B, K), device) & real_B[:, None]
    weights_K = _weights(weights, (B, K), device)
    if combine is not None and weights_K.ndim == 2:
        raise ValueError("combine needs the same weights for all samples")
    finite_BK = _finite(given_BK, there_BK, names)
    group_B, G = group_index(group_ids, B, device)
    counted_B = zero.has_a_reward(there_BK, weights_K)
    if method.batch_norm == "token":
        times_B = counted_B * _token_counts(token_count_B, (B,), device)
    else:
        times_B = counted_B
    return Batch(
        rewards_BK=finite_BK,
        present_BK=there_BK,
        valid_B=real_B,
        group_B=group_B,
        G=G,
        weights_K=weights_K,
        # The dtype in which the rewards arrived says it, and not the float64 that they are now.
        precision_K=zero.precision_of(finite_BK, given_BK.dtype),
        counted_B=counted_B,
        times_B=times_B,
    )


def with_summed_rewards(batch: Batch) -> Batch:
    """Return the batch of GRPO: the weighted sum of the raw rewards, (B, 1), is its only reward.

    A missing reward adds 0. Each reward is centred in its group before the sum, which step 1 would
    do to the sum, so that a constant sum of varying rewards is exactly 0.
    """
    valid_BK = batch.valid_B[:, None].expand_as(batch.rewards_BK)
    centred_BK, ranges = normalize_groups(
        batch.rewards_BK, valid_BK, batch.group_B, batch.G, eps=None
    )
    weighted_sum_B = (centred_BK * batch.weights_K).sum(dim=1)
    sum_B = zero.sum_without_rounding(
        weighted_sum_B, batch.weights_K, batch.group_B, ranges, batch.precision_K
    )
    sum_B1 = sum_B[:, None]
    return replace(
        batch,
        rewards_BK=sum_B1,
        present_BK=batch.valid_B[:, None],
        weights_K=batch.weights_K.new_ones(1),
        # The rounding of the rewards has just been taken out, so that of float64 is left.
        precision_K=zero.precision_of(sum_B1, torch.float64),
    )


def group_index(group_ids: Any, B: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the group number of each sample, (B,) int64 from 0, and the number of groups."""
    ids = group_ids.tolist() if isinstance(group_ids, Tensor | np.ndarray) else list(group_ids)
    if len(ids) != B:
        raise ValueError(f"group_ids: expected {B}, one per row of rewards_BK, got {len(ids)}")
    kinds = {type(each) for each in ids}
    all_integers = all(_is_integer(kind) for kind in kinds)
    all_strings = all(issubclass(kind, str) for kind in kinds)
    if not all_integers and not all_strings:
        names = sorted(kind.__name__ for kind in kinds)
        raise TypeError(f"group_ids: expected all integers or all strings, got {names}")

    number_of: dict[Any, int] = {}
    for each in ids:
        if each not in number_of:
            number_of[each] = len(number_of)
    numbers = [number_of[each] for each in ids]
    return torch.tensor(numbers, dtype=torch.int64, device=device), len(number_of)


def _is_integer(kind: type) -> bool:
    # Bools are refused: they are probably the result of a comparison, passed by mistake.
    return issubclass(kind, int | np.integer) and kind is not bool


def as_tensor(values: Any) -> Tensor:
    """Return values as a tensor: arrays keep their dtype, and a tensor also keeps its device.

    An array of objects, such as Python's numbers, becomes float64.
    """
    if isinstance(values, Tensor):
        return values
    if isinstance(values, np.ndarray):
        dtype = values.dtype.newbyteorder("=")
        if dtype.kind == "O":
            dtype = np.dtype(np.float64)
        # torch refuses negative strides and foreign bytes, and warns of memory that is read-only.
        # Other arrays in the order of C are not copied.
        return torch.from_numpy(np.require(values, dtype, ["C", "A", "W"]))
    # Python's floats have 64 bits, of which torch would keep 32.
    return torch.as_tensor(values, dtype=torch.float64, device="cpu")


def _finite(given_BK: Tensor, present_BK: Tensor, names: Sequence[str] | None) -> Tensor:
    """Return rewards in float64, 0 where missing; raise ValueError for NaN, inf or too large."""
    rewards_BK = given_BK.to(torch.float64)
    # A NaN is not <= anything, so it counts as bad here.
    bad_BK = ~(rewards_BK.abs() <= LARGEST) & present_BK
    if bad_BK.any():
        row, column = bad_BK.nonzero()[0].tolist()
        what = f"rewards_BK[{row}, {column}]"
        if names is not None:
            what = f"rewards_BK: reward {names[column]!r} of sample {row}"
        raise ValueError(
            f"{what} is {rewards_BK[row, column].item()}; expected a finite number up to "
            f"{LARGEST:g}. Give None for a reward that does not apply, and say with valid_B which "
            "rows are padding"
        )
    return torch.where(present_BK, rewards_BK, 0.0)


def _weights(weights: Any, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return weights_K or weights_BK in float64, all 1 for None; raise ValueError for others."""
    B, K = shape
    if weights is None:
        return torch.ones(K, dtype=torch.float64, device=device)
    weights_K = as_tensor(weights).to(device, torch.float64)
    if weights_K.shape not in ((K,), (B, K)) or not (weights_K.abs() <= LARGEST).all():
        raise ValueError(
            f"weights: expected {K} finite numbers up to {LARGEST:g}, got {weights_K.tolist()}"
        )
    return weights_K


def _mask(name: str, mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the mask as a bool tensor, all True for None; raise ValueError for another shape."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    tensor = as_tensor(mask).to(device)
    _check_shape(name, tensor, shape)
    return tensor.to(torch.bool)


def _token_counts(counts: Any, shape: tuple[int], device: torch.device) -> Tensor:
    """Return the counts as a tensor of any dtype; raise ValueError for None or another shape."""
    if counts is None:
        raise ValueError("batch_norm='token' needs token_count_B, the response lengths")
    tensor = as_tensor(counts).to(device)
    _check_shape("token_count_B", tensor, shape)
    return tensor


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    # Broadcasting would make something of a wrong shape, and nobody would notice.
    if tensor.shape != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(tensor.shape)}")
