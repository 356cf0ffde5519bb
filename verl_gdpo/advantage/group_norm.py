"""Step 1 of the advantage.

Shape suffixes: B samples, K rewards, G groups.
"""

import torch

from verl_gdpo.advantage.zero import Ranges, sum_without_rounding


def normalize_groups(
    rewards_BK: torch.Tensor,
    present_BK: torch.Tensor,
    group_B: torch.Tensor,
    group_count: int,
    *,
    eps: float | None,
) -> tuple[torch.Tensor, Ranges]:
    """Return z_BK, and the ranges of the rewards, which say how far rounding may have moved a z.

    Absent values have z = 0. A reward that is constant in a group has z = 0 there.

    Args:
        rewards_BK: float64, 0 where absent.
        eps: number added to the std. With None, z is not divided by the std.
    """
    shape_GK = (group_count, rewards_BK.shape[1])

    def group_sum(values_BK: torch.Tensor) -> torch.Tensor:
        return rewards_BK.new_zeros(shape_GK).index_add_(0, group_B, values_BK)

    # a group with fewer than two values gives 0 / 0 below; the last `where` replaces it with 0
    there_BK, absent_BK = present_BK.to(torch.float64), ~present_BK
    count_GK = group_sum(there_BK)
    mean_GK = group_sum(rewards_BK * there_BK) / count_GK
    centred_BK = (rewards_BK - mean_GK[group_B]) * there_BK

    index_BK = group_B[:, None].expand_as(rewards_BK)
    low_GK = rewards_BK.new_full(shape_GK, torch.inf).scatter_reduce_(
        0, index_BK, rewards_BK.masked_fill(absent_BK, torch.inf), "amin"
    )
    high_GK = rewards_BK.new_full(shape_GK, -torch.inf).scatter_reduce_(
        0, index_BK, rewards_BK.masked_fill(absent_BK, -torch.inf), "amax"
    )
    scale_GK = torch.ones_like(count_GK)
    if eps is not None:
        scale_GK = (group_sum(centred_BK.square()) / (count_GK - 1)).sqrt() + eps
        centred_BK = centred_BK / scale_GK[group_B]
    ranges = Ranges(count_GK, low_GK, high_GK, scale_GK)
    return torch.where(ranges.varies_GK[group_B] & present_BK, centred_BK, 0.0), ranges


def centred_sum(
    rewards_BK: torch.Tensor,
    weights_K: torch.Tensor,
    valid_B: torch.Tensor,
    group_B: torch.Tensor,
    group_count: int,
    precision_K: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sum of raw rewards minus its mean in the group, (B, 1).

    A missing reward adds 0. Each reward is centred before the sum, so that a constant sum of
    varying rewards is exactly 0.
    """
    valid_BK = valid_B[:, None].expand_as(rewards_BK)
    centred_BK, ranges = normalize_groups(rewards_BK, valid_BK, group_B, group_count, eps=None)
    sum_B = (centred_BK * weights_K).sum(dim=1)
    return sum_without_rounding(sum_B, weights_K, group_B, ranges, precision_K)[:, None]
