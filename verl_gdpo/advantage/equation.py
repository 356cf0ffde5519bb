"""The GDPO advantage: normalise each reward in its group, sum with weights, normalise the batch.

Liu et al., "GDPO", arXiv 2601.05242. For B samples, K rewards, and the group g(i) of sample i:

    (1) group   z[i,k] = (r[i,k] - mean_g r[.,k]) / (std_g r[.,k] + eps)     per reward, per group
    (2) sum     S[i]   = sum_k w_k z[i,k]                                    or variants.py
    (3) batch   A[i]   = (S[i] - mean S) / (std S + eps)                     over all samples
    (4) tokens  A[i,t] = A[i] * response_mask[i,t]

Both std are unbiased (ddof 1). Shape suffixes: B samples, K rewards, G groups, T tokens.
This module knows tensors only: no text, no verl, no configuration.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from verl_gdpo.advantage.group_norm import centred_sum, normalize_groups
from verl_gdpo.advantage.inputs import (
    check_choice,
    finite_rewards,
    group_index,
    reward_tensor,
    reward_weights,
    row_mask,
    where_it_is,
)
from verl_gdpo.advantage.zero import mean_without_rounding, precision_of, sum_without_rounding

PAPER_EPS = 1e-4  # of the authors' code and of TRL
VERL_EPS = 1e-6  # of verl's own grpo and gdpo

GroupNorm = Literal["per_reward", "summed"]
BatchNorm = Literal["sample", "token", "none"]
# (z_BK, rewards_BK, group_index_B, weights_K, present_BK, valid_B) -> S_B; see variants.py
Combine = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    torch.Tensor,
]


class GdpoScalars(NamedTuple):
    """The results of steps 1 to 3, in float64 on the device of the rewards."""

    z_BK: torch.Tensor  # step 1; K is 1 under group_norm="summed"
    S_B: torch.Tensor  # step 2
    A_B: torch.Tensor  # step 3


@torch.no_grad()
def compute_gdpo_advantage(
    rewards_BK: Any,
    group_ids: Any,
    response_mask_BT: Any,
    *,
    weights: Any = None,
    present_BK: Any = None,
    valid_B: Any = None,
    group_norm: GroupNorm = "per_reward",
    normalize_by_std: bool = True,
    batch_norm: BatchNorm = "sample",
    eps: float = PAPER_EPS,
    batch_eps: float | None = None,
    batch_var_eps: float = 0.0,
    combine: Combine | None = None,
) -> torch.Tensor:
    """Return GDPO advantages per token.

    ============  =============  ================  =================================
    group_norm    batch_norm     normalize_by_std  method
    ============  =============  ================  =================================
    per_reward    sample         True              GDPO
    per_reward    none           True              GDPO without batch norm
    per_reward    token          True              verl's built-in `gdpo`
    summed        none           True              GRPO
    summed        none           False             GRPO without std (Dr. GRPO)
    summed        sample         True              GRPO + batch norm
    ============  =============  ================  =================================

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
        group_norm: normalise each reward ("per_reward") or their weighted sum ("summed").
        normalize_by_std: if False, step 1 subtracts the group's mean and does not divide.
        batch_norm: whether step 3 counts samples ("sample"), response tokens ("token"), or is left
            out ("none").
        eps: number added to the std in steps 1 and 3.
        batch_eps: number added to the std in step 3 instead of eps. With None, eps is used.
        batch_var_eps: number added to the variance in step 3, before the square root.
        combine: function that replaces the weighted sum of step 2; see `variants`.

    Returns:
        advantages_BT: float32, on the mask's device, without gradient. All trained tokens of a
        sample have the same number, all other tokens have 0.

    A reward that is constant in a group contributes exactly 0 there. A group with a single sample
    has S = 0 and stays in the statistics of step 3. S is set to exactly 0 where rewards
    cancel up to the rounding errors of the rewards and of step 1. Rewards in float32 are known to
    its precision; whole numbers up to 2^24, and a reward that varies alone in its group, exactly.

    Raises:
        ValueError: shapes disagree, a reward of a valid sample is NaN or infinite, an option is
            unknown, combine is given with group_norm="summed", or combine does not return B finite
            numbers.
        TypeError: group ids are neither all integers nor all strings.
    """
    mask_BT = where_it_is(response_mask_BT).bool()
    if mask_BT.ndim != 2:
        raise ValueError(
            f"response_mask_BT: expected shape (samples, tokens), got {tuple(mask_BT.shape)}"
        )
    scalars = compute_gdpo_scalars(
        reward_tensor(rewards_BK).to(mask_BT.device),
        group_ids,
        token_count_B=mask_BT.sum(dim=1) if batch_norm == "token" else None,
        weights=weights,
        present_BK=present_BK,
        valid_B=mask_BT.any(dim=1) if valid_B is None else valid_B,
        group_norm=group_norm,
        normalize_by_std=normalize_by_std,
        batch_norm=batch_norm,
        eps=eps,
        batch_eps=batch_eps,
        batch_var_eps=batch_var_eps,
        combine=combine,
    )
    return spread_over_tokens(scalars.A_B, mask_BT)


@torch.no_grad()
def spread_over_tokens(A_B: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
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
    group_norm: GroupNorm = "per_reward",
    normalize_by_std: bool = True,
    batch_norm: BatchNorm = "sample",
    eps: float = PAPER_EPS,
    batch_eps: float | None = None,
    batch_var_eps: float = 0.0,
    combine: Combine | None = None,
) -> GdpoScalars:
    """Return z, S and A of each sample (steps 1 to 3); see `compute_gdpo_advantage`.

    Args:
        token_count_B: trained tokens per sample; only batch_norm="token" needs them.
        valid_B: with None, every row is a real sample.
    """
    batch_eps = eps if batch_eps is None else batch_eps
    _check_options(group_norm, batch_norm, (eps, batch_eps, batch_var_eps), combine)
    rewards_BK = reward_tensor(rewards_BK)
    if rewards_BK.ndim != 2 or 0 in rewards_BK.shape:
        raise ValueError(
            f"rewards_BK: expected shape (samples, rewards), got {tuple(rewards_BK.shape)}"
        )
    B, K = rewards_BK.shape
    device = rewards_BK.device
    valid_B = row_mask("valid_B", valid_B, (B,), device)
    present_BK = row_mask("present_BK", present_BK, (B, K), device) & valid_B[:, None]
    weights_K = reward_weights(weights, K, device)
    arrived_as = rewards_BK.dtype
    rewards_BK = finite_rewards(rewards_BK, present_BK)
    precision_K = precision_of(rewards_BK, arrived_as)
    groups = group_index(group_ids, B, device)
    if group_norm == "summed":
        rewards_BK = centred_sum(rewards_BK, weights_K, valid_B, *groups, precision_K)
        present_BK, precision_K = valid_B[:, None], precision_of(rewards_BK, torch.float64)
        weights_K = weights_K.new_ones(1)

    z_BK, ranges = normalize_groups(
        rewards_BK, present_BK, *groups, eps=eps if normalize_by_std else None
    )
    if combine is None:
        S_B = (z_BK * weights_K).sum(dim=1)
    else:
        S_B = combine(z_BK, rewards_BK, groups[0], weights_K, present_BK, valid_B)
        S_B = torch.where(valid_B, _checked_sum(S_B, B), 0.0)
        # a variant may divide by a weight below 1; a reward of weight 0 leaves no rounding either
        weights_K = weights_K.abs().clamp(min=1.0) * (weights_K != 0)
    S_B = sum_without_rounding(S_B, weights_K, groups[0], ranges, precision_K)
    if batch_norm == "none":
        return GdpoScalars(z_BK, S_B, S_B)
    count_B = valid_B
    if batch_norm == "token":
        if token_count_B is None:
            raise ValueError("batch_norm='token' needs token_count_B, the response lengths")
        count_B = count_B * torch.as_tensor(token_count_B, device=device)
    return GdpoScalars(z_BK, S_B, _normalize_batch(S_B, count_B, valid_B, batch_eps, batch_var_eps))


def _check_options(
    group_norm: str, batch_norm: str, epsilons: tuple[float, float, float], combine: Combine | None
) -> None:
    """Raise ValueError for an option that is unknown, out of range, or excludes another."""
    check_choice("group_norm", group_norm, get_args(GroupNorm))
    check_choice("batch_norm", batch_norm, get_args(BatchNorm))
    for name, value in zip(("eps", "batch_eps", "batch_var_eps"), epsilons, strict=True):
        if not (np.isfinite(value) and value >= 0):
            raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
    if combine is not None and group_norm == "summed":
        raise ValueError("combine needs group_norm='per_reward': 'summed' adds the rewards first")


def _checked_sum(S_B: Any, B: int) -> torch.Tensor:
    """Return the result of a `combine` as float64, or raise ValueError if it cannot be used."""
    if not isinstance(S_B, torch.Tensor) or S_B.shape != (B,):
        got = tuple(S_B.shape) if isinstance(S_B, torch.Tensor) else type(S_B).__name__
        raise ValueError(f"combine: expected a tensor of shape ({B},), got {got}")
    if not torch.isfinite(S_B).all():
        row = int((~torch.isfinite(S_B)).nonzero()[0])
        raise ValueError(f"combine: S is {S_B[row].item()} in row {row}; expected a finite number")
    return S_B.to(torch.float64)


def _normalize_batch(
    S_B: torch.Tensor, count_B: torch.Tensor, valid_B: torch.Tensor, eps: float, var_eps: float
) -> torch.Tensor:
    """Return A_B (step 3), counting sample i `count_B[i]` times. A constant S gives exactly 0."""
    total = count_B.sum()
    counted_B = count_B > 0
    low = S_B.masked_fill(~counted_B, torch.inf).min()
    high = S_B.masked_fill(~counted_B, -torch.inf).max()
    # complete groups sum to 0, so a mean that is only rounding must not move groups without signal
    mean = mean_without_rounding((S_B * count_B).sum() / total, S_B)
    variance = ((S_B - mean).square() * count_B).sum() / (total - 1)
    A_B = (S_B - mean) / ((variance + var_eps).sqrt() + eps)
    return torch.where(valid_B & (high > low), A_B, 0.0)
