"""The function that verl calls for `algorithm.adv_estimator=gdpo`.

Relies on verl 0.9: verl calls entries of `core_algos.ADV_ESTIMATOR_REGISTRY` with the
keywords `token_level_rewards, response_mask, index, config`, and the entry "gdpo" also with
`non_tensor_batch, batch`.
"""

from collections.abc import Mapping
from typing import Any

import torch

from verl_gdpo.algorithm.equation import spread_over_tokens
from verl_gdpo.algorithm.matrix import scalars_of
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.samples import BatchRows, RewardError
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.configuration import refuse_kl_in_reward
from verl_gdpo.hooks.step import Step, current_step, fitting

# the message for a trainer that passes no rewards; all trainers extended by us pass them
NO_REWARDS = (
    "gdpo: no rewards reached the estimator. verl-gdpo extends the trainers that are derived from "
    "verl's PPOTrainer or from its legacy trainer. A trainer that calls verl's compute_advantage "
    "by itself has to pass a column for each reward in data.non_tensor_batch, and their names in "
    'data.meta_info["reward_extra_keys"] or in algorithm.gdpo.rewards'
)


def compute_gdpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    config: Any,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **_verl_extras: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_BT, returns_BT), which are equal for an outcome reward.

    Args:
        token_level_rewards: (B, T) the summed reward. It is not used, because GDPO needs each
            reward by itself.
        response_mask: (B, T) 1 on trained tokens, 0 elsewhere.
        index: (B,) group ids, which are verl's prompt uids.
        config: verl's `algorithm` block.
        non_tensor_batch: the reward columns, if a trainer of the user calls verl's function.

    Raises:
        RewardError: a row lacks a reward; see `RewardMatrix.of` and `scalars_of`.
        ValueError: `config` asks for a KL penalty in the reward.
    """
    refuse_kl_in_reward(config or {})
    step = current_step()
    if step is None:
        trainer = fitting.get()
        settings = trainer.gdpo if trainer else read_settings(config or {})
        step = Step(settings, _rows_of(settings, non_tensor_batch or {}, len(response_mask)))
    rows, settings = step.rows, step.settings
    if len(rows) != len(response_mask):
        raise RuntimeError(
            f"gdpo: got {len(response_mask)} rows, but the rewards of {len(rows)} rows"
        )
    token_count_B = None
    if settings.batch_norm == "token":
        trained_B = (response_mask != 0).sum(dim=1).cpu().numpy()
        token_count_B = torch.from_numpy(rows.over_sessions(trained_B))
    step.scalars = scalars_of(step.rewards, rows.counted_B, index, settings, token_count_B)
    # every row of a session gets the advantage of its last row; padding keeps 0
    A_B = step.scalars.A_B[torch.from_numpy(rows.session_B)]
    advantages_BT = spread_over_tokens(A_B, response_mask)
    return advantages_BT, advantages_BT


def _rows_of(settings: GdpoSettings, given: Mapping[str, Any], size: int) -> BatchRows:
    columns = {name: given[name] for name in settings.names if name in given}
    if not columns:
        raise RewardError(NO_REWARDS)
    return BatchRows.from_columns(columns, size)
