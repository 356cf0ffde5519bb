"""The GDPO advantage of each token, for any trainer and for notebooks."""

from typing import Any

import torch
from torch import Tensor

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.equation import as_tensor, compute_gdpo_scalars, spread_over_tokens


@torch.no_grad()
def compute_gdpo_advantage(
    rewards_BK: Any, group_ids: Any, response_mask_BT: Any, *, valid_B: Any = None, **options: Any
) -> Tensor:
    """Return GDPO advantages per token (steps 1 to 4).

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
        valid_B: False for padding rows. They get 0 and enter no statistic. With None, rows with an
            all-zero mask count as padding. Pass it when you can: rejection in rollout correction
            also zeroes the masks of real samples, and those count.
        options: weights, missing rewards and the method; see `compute_gdpo_scalars`.

    Returns:
        advantages_BT: float32, on the mask's device, without gradient. All trained tokens of a
        sample have the same number, all other tokens have 0.

    Raises:
        ValueError, TypeError: see `compute_gdpo_scalars`.
    """
    mask_BT = as_tensor(response_mask_BT).bool()
    if mask_BT.ndim != 2:
        raise ValueError(
            f"response_mask_BT: expected shape (samples, tokens), got {tuple(mask_BT.shape)}"
        )
    if valid_B is None:
        valid_B = zero.has_tokens(mask_BT)
    token_count_B = None
    if options.get("batch_norm") == "token":
        # Only this option needs them, and the mask of a step has millions of tokens.
        token_count_B = mask_BT.sum(dim=1)
    scalars = compute_gdpo_scalars(
        as_tensor(rewards_BK).to(mask_BT.device),
        group_ids,
        token_count_B=token_count_B,
        valid_B=valid_B,
        **options,
    )
    return spread_over_tokens(scalars.A_B, mask_BT)
