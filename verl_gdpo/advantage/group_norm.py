"""Step 1 of the advantage, with a bound on the rounding error of its result.

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
    """Return z_BK, and rounding_GK, the largest rounding error of a z in each group.

    Absent values have z = 0. A reward that is constant in a group has z = 0 there.

    Args:
        rewards_BK: float64, 0 where absent.
        eps: number added to the std. With None, z is not divided by the std.
        precision: machine epsilon of the number format in which the rewards arrived.
    """
    shape_GK = (group_count, rewards_BK.shape[1])

    def group_sum(values_BK: torch.Tensor) -> torch.Tensor:
        return rewards_BK.new_zeros(shape_GK).index_add_(0, group_B, values_BK)

    # a group with fewer than two values gives 0 / 0 below; the last `where` replaces it with 0
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
    # compare the inputs, because the mean of equal numbers can differ from them by a rounding error
    varies_GK = high_GK > low_GK
    # errors relative to the largest value: precision / 2 each for r and its mean, and EPS64 / 2
    # for each term of the sums over n values and over K rewards
    terms_GK = count_GK + shape_GK[1]
    rounding_GK = (precision + terms_GK * EPS64 / 2) * torch.maximum(high_GK, -low_GK)
    # at most a quarter of the range, so that one varying reward alone never counts as rounding
    rounding_GK = torch.minimum(rounding_GK, (high_GK - low_GK) / 4)
    if eps is not None:
        scale_GK = (group_sum(centred_BK.square()) / (count_GK - 1)).sqrt() + eps
        centred_BK, rounding_GK = centred_BK / scale_GK[group_B], rounding_GK / scale_GK
    z_BK = torch.where(varies_GK[group_B] & present_BK, centred_BK, 0.0)
    return z_BK, torch.where(varies_GK, rounding_GK, 0.0)


def without_rounding(
    S_B: torch.Tensor, rounding_GK: torch.Tensor, weights_K: torch.Tensor, group_B: torch.Tensor
) -> torch.Tensor:
    """Return S_B, set to exactly 0 where it is not larger than the rounding error of its terms."""
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
    """Return the weighted sum of raw rewards minus its mean in the group, (B, 1).

    A missing reward adds 0. Each reward is centred before the sum, so that a constant sum of
    varying rewards is exactly 0.
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
