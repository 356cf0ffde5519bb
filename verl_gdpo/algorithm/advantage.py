"""The GDPO advantage of each token, for any trainer and for notebooks."""

import inspect
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.equation import (
    as_tensor,
    compute_gdpo_scalars,
    count_tokens,
    spread_over_tokens,
)
from verl_gdpo.algorithm.given_rewards import Numbers, Present, Rewards, Weights, read_rewards
from verl_gdpo.algorithm.settings import PAPER_EPS, unknown_option
from verl_gdpo.algorithm.variants import Combine


@torch.no_grad()
def compute_gdpo_advantage(
    rewards_BK: Rewards,
    group_ids: Numbers,
    response_mask_BT: Numbers,
    *,
    weights: Weights | None = None,
    present: Present | None = None,
    valid_B: Numbers | None = None,
    group_norm: Literal["per_reward", "summed"] = "per_reward",
    batch_norm: Literal["sample", "token", "none"] = "sample",
    eps: float = PAPER_EPS,
    normalize_by_std: bool = True,
    batch_eps: float | None = None,
    batch_var_eps: float = 0.0,
    combine: Combine | None = None,
    **unknown: NoReturn,
) -> Tensor:
    """Return GDPO advantages per token (steps 1 to 4 of `equation.py`), for B samples.

    >>> rewards_BK = [[0, 0], [0, 1], [0, 0], [1, 1]]  # correct, short
    >>> mask_BT = [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]]
    >>> compute_gdpo_advantage(rewards_BK, ["p", "p", "q", "q"], mask_BT)
    tensor([[-0.5477, -0.5477, -0.0000],
            [ 0.5477,  0.5477,  0.5477],
            [-1.0954, -0.0000, -0.0000],
            [ 1.0954,  1.0954,  1.0954]])

    Args:
        rewards_BK: raw rewards on any scale, None where one does not apply to a sample. One of

            - a matrix, (B, K): a tensor, an array (also of objects), or nested lists;
            - columns: {name: B values}, each a tensor, an array or a list;
            - samples: B dicts {name: value}, as reward functions return them. All have the same
              names.

            By name, every column of numbers is a reward, except `score`, which has to be their
            sum. `weights` by name chooses among them.
        group_ids: B integers or strings; samples of one prompt share an id. Any order.
        response_mask_BT: non-zero on the tokens that are trained.
        weights: K factors on the *normalised* rewards, (B, K) of them, which are equal within a
            group, or {name: factor} for rewards by name, of which the others are left out. With
            None, each is 1.
        present: False where a reward does not apply: (B, K), or {name: B bools} for rewards by
            name. It says the same as None among the rewards, for tensors, which cannot hold it.
            Such a reward contributes 0, and is left out of the statistics of its group.
        valid_B: False for padding rows. They get 0 and enter no statistic. With None, rows with an
            all-zero mask count as padding. Pass it when you can: rejection in rollout correction
            also zeroes the masks of real samples, and those count.
        group_norm: "per_reward" normalises each reward within its group, which is GDPO; "summed"
            normalises their weighted sum, which is GRPO.
        batch_norm: "sample" normalises over the samples of the batch, "token" over their trained
            tokens, "none" not at all.
        eps: is added to both standard deviations.
        normalize_by_std: if False, groups are only centred.
        batch_eps: is added to the standard deviation of the batch, in place of `eps`.
        batch_var_eps: is added to the variance of the batch, before the square root.
        combine: a function in the place of the weighted sum; see `verl_gdpo.algorithm.variants`.

    Returns:
        advantages_BT: float32, on the mask's device, without gradient. All trained tokens of a
        sample have the same number, all other tokens have 0.

    Raises:
        ValueError: a shape is wrong, a reward of a real sample is no finite number, a name is not
            there or missing in a sample, or an option has a wrong value.
        TypeError: group ids are neither all integers nor all strings, or an option is unknown.
    """
    # Python's own message names neither the option that is meant nor the known ones.
    for name in unknown:
        parameters = inspect.signature(compute_gdpo_advantage).parameters.values()
        options = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
        raise TypeError(f"compute_gdpo_advantage: {unknown_option(name, options)}")
    mask_BT = as_tensor(response_mask_BT).bool()
    if mask_BT.ndim != 2:
        raise ValueError(
            f"response_mask_BT: expected shape (samples, tokens), got {tuple(mask_BT.shape)}"
        )
    B = len(mask_BT)
    # All forms become one matrix on the mask's device, so that the result is there as well.
    given = read_rewards(rewards_BK, weights, present, B, mask_BT.device)
    if len(given.values_BK) != B:
        raise ValueError(
            f"response_mask_BT: expected {len(given.values_BK)} rows, one for each sample of "
            f"rewards_BK, got {B}"
        )
    real_B: Any = valid_B
    if valid_B is None:
        # A row without a trained token is padding, as far as anybody can know here.
        real_B = zero.has_tokens(mask_BT)
    token_count_B = None
    if batch_norm == "token":
        # Only this option needs them, and the mask of a step has millions of tokens.
        token_count_B = count_tokens(mask_BT)
    scalars = compute_gdpo_scalars(
        given.values_BK,
        group_ids,
        token_count_B=token_count_B,
        weights=given.weights,
        present_BK=given.present_BK,
        valid_B=real_B,
        combine=combine,
        names=given.names,
        group_norm=group_norm,
        batch_norm=batch_norm,
        eps=eps,
        normalize_by_std=normalize_by_std,
        batch_eps=batch_eps,
        batch_var_eps=batch_var_eps,
    )
    return spread_over_tokens(scalars.A_B, mask_BT)
