"""The advantage of each row of a batch, given its matrix of rewards and the settings."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.advantage.equation import GdpoScalars, compute_gdpo_scalars
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.rows import RewardError
from verl_gdpo.settings.algorithm import GdpoSettings


def scalars_of(
    rewards: RewardMatrix,
    counted_B: npt.NDArray[np.bool_],
    group_ids: Any,
    settings: GdpoSettings,
    token_count_B: torch.Tensor | None = None,
) -> GdpoScalars:
    """Return z, S and A of each of B rows under `settings`; see `compute_gdpo_scalars`.

    Args:
        counted_B: True for the rows that count; the other rows get 0.
        group_ids: B ids; samples of one prompt share an id.
        token_count_B: trained tokens of each row; only batch_norm="token" needs them.

    Raises:
        RewardError: `combine` needs the bounds of a reward, and they are not declared.
    """
    try:
        combine = settings.combine_for(rewards.weights)
    except ValueError as error:
        raise RewardError(str(error)) from None
    return compute_gdpo_scalars(
        rewards.values_BK,
        group_ids,
        token_count_B=token_count_B,
        weights=list(rewards.weights.values()),
        present_BK=rewards.present_BK,
        valid_B=counted_B,
        group_norm=settings.group_norm,
        normalize_by_std=settings.normalize_by_std,
        batch_norm=settings.batch_norm,
        eps=settings.eps,
        batch_eps=settings.batch_eps,
        batch_var_eps=settings.batch_var_eps,
        combine=combine,
    )
