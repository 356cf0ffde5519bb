"""Step 1 of the advantage, and how much of its result may be rounding.

Shape suffixes: B samples, K rewards, G groups.
"""

import torch

EPS64 = torch.finfo(torch.float64).eps


def normalize_groups(
    rewards_BK: torch.Tensor,
    present_BK: torch.Tensor,
    group_B: torch.Tensor,
    group_count: int,
    *,
    eps: float | None,
    precision: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """z_BK, and rounding_GK: up to how far from 0 a z of the group may be by rounding alone.

    Absent values and constant columns come out as exactly 0.

    Args:
        rewards_BK: float64, 0 where absent.
        eps: added to the std; None only subtracts the mean.
        precision: relative distance of neighbouring numbers in the format that the rewards had.
    """
    shape_GK = (group_count, rewards_BK.shape[1])

    def group_sum(values_BK: torch.Tensor) -> torch.Tensor:
        return rewards_BK.new_zeros(shape_GK).index_add_(0, group_B, values_BK)

    # where a group has no value, or one, 0 / 0 below is of no use to anybody: nothing varies there
    count_GK = group_sum(present_BK.to(torch.float64))
    mean_GK = group_sum(rewards_BK * present_BK) / count_GK
    centred_BK = (rewards_BK - mean_GK[group_B]) * present_BK

    index_BK = group_B[:, None].expand_as(rewards_BK)
    low_GK = rewards_BK.new_full(shape_GK, torch.inf).scatter_reduce_(
        0, index_BK, rewards_BK.masked_fill(~present_BK, torch.inf), "amin"
    )
    high_GK = rewards_BK.new_full(shape_GK, -torch.inf).scatter_reduce_(
        0, index_BK, rewards_BK.masked_fill(~present_BK, -torch.inf), "amax"
    )
    # the mean of equal numbers can miss them by a rounding, so constancy is told from the input
    varies_GK = high_GK > low_GK
    # of the largest value, r and its mean miss half a precision each, and sums of n values and of
    # K z their number of EPS64 / 2; at most a quarter of the range, or a reward alone would be lost
    terms_GK = count_GK + shape_GK[1]
    rounding_GK = (precision + terms_GK * EPS64 / 2) * torch.maximum(high_GK, -low_GK)
    rounding_GK = torch.minimum(rounding_GK, (high_GK - low_GK) / 4)
    if eps is not None:
        scale_GK = (group_sum(centred_BK.square()) / (count_GK - 1)).sqrt() + eps
        centred_BK, rounding_GK = centred_BK / scale_GK[group_B], rounding_GK / scale_GK
    z_BK = torch.where(varies_GK[group_B] & present_BK, centred_BK, 0.0)
    return z_BK, torch.where(varies_GK, rounding_GK, 0.0)


def without_rounding(
    S_B: torch.Tensor, rounding_GK: torch.Tensor, weights_K: torch.Tensor, group_B: torch.Tensor
) -> torch.Tensor:
    """S, exactly 0 where it is no more than the roundings of its parts w z."""
    rounding_G = (rounding_GK * weights_K.abs()).sum(dim=1)
    return torch.where(S_B.abs() <= rounding_G[group_B], 0.0, S_B)


def centred_sum(
    rewards_BK: torch.Tensor,
    weights_K: torch.Tensor,
    valid_B: torch.Tensor,
    group_B: torch.Tensor,
    group_count: int,
    precision: float,
) -> torch.Tensor:
    """The weighted sum of raw rewards less its group's mean, (B, 1); a missing reward adds 0.

    Each reward is centred by itself, so that a constant sum of varying rewards is exactly 0.
    """
    valid_BK = valid_B[:, None].expand_as(rewards_BK)
    centred_BK, rounding_GK = normalize_groups(
        rewards_BK,
        valid_BK,
        group_B,
        group_count,
        eps=None,
        precision=precision,
    )
    sum_B = (centred_BK * weights_K).sum(dim=1)
    return without_rounding(sum_B, rounding_GK, weights_K, group_B)[:, None]
