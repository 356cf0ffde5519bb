"""The functions that verl calls for advantages: its estimator "gdpo", and what looks it up.

Relies on verl 0.9: verl calls estimators with the keywords `token_level_rewards, response_mask,
index, config`, and "gdpo" also with `non_tensor_batch, batch`. The trainers of V1 and the legacy
one both call `ray_trainer.compute_advantage`.
"""

import logging
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch

from verl_gdpo.algorithm.equation import count_tokens, spread_over_tokens
from verl_gdpo.algorithm.matrix import scalars_of
from verl_gdpo.algorithm.metrics import small_ranges
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.hooks import net
from verl_gdpo.hooks.advantage_step import AdvantageStep, current_step
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.configuration import KL_IN_REWARD
from verl_gdpo.hooks.extend import load, record_of

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

# The message for a trainer that passes no rewards. All trainers that we extend pass them.
NO_REWARDS = (
    "gdpo: no rewards reached the estimator. verl-gdpo extends the trainers that are derived from "
    "verl's PPOTrainer or from its legacy trainer. One that calls verl's compute_advantage itself "
    "has to pass each reward as a column of data.non_tensor_batch. Their names go into "
    'data.meta_info["reward_extra_keys"] or algorithm.gdpo.rewards'
)

# The legacy trainer whose `fit` runs in this context: verl's `compute_advantage` does not know it.
fitting: ContextVar[Any] = ContextVar("verl_gdpo_legacy_trainer", default=None)


def compute_in_step(call: Call) -> Any:
    """Stay out of the way of a V1 trainer, which has opened a step; else open one."""
    if current_step() is not None:
        return call.hand_on()
    # A run of V1 never needs this module, and so does not import it.
    return load("verl_gdpo.hooks.legacy:compute_in_step")(call)


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
    # Only a trainer of the user's comes here with it: ours refuses it before it starts.
    if config and config.get("use_kl_in_reward", False):
        raise ValueError(KL_IN_REWARD)
    step = current_step()
    if step is None:
        step = _step_of_columns(non_tensor_batch or {}, index, config)
    rows = step.rows
    if len(rows) != len(response_mask):
        raise RuntimeError(
            f"gdpo: got {len(response_mask)} rows, but the rewards of {len(rows)} rows"
        )

    token_count_B = None
    if step.settings.batch_norm == "token":
        token_count_B = _trained_tokens(response_mask, rows)
    step.scalars = scalars_of(step.rewards, rows.counted_B, index, step.settings, token_count_B)
    # Every row of a session gets the advantage of its last row. That of padding is 0.
    A_B = step.scalars.A_B[torch.from_numpy(rows.session_B)]
    advantages_BT = spread_over_tokens(A_B, response_mask)
    _log_small_ranges(step)
    return advantages_BT, advantages_BT


def _step_of_columns(columns: Mapping[str, Any], uids: Any, algorithm: Any) -> AdvantageStep:
    """Return a checked step for a trainer that calls the estimator itself, and so opened none.

    Raises:
        RewardError: the trainer passes no reward, or one that the batch must not train on.
    """
    record = record_of(fitting.get())
    if record is not None:
        net.refuse_unseen_batch(fitting.get())
        settings: GdpoSettings = record.settings
    else:
        settings = read_settings(algorithm or {})
    # The columns have other values too, of which only the configured names tell the rewards.
    rewards = {name: columns[name] for name in settings.names if name in columns}
    if not rewards:
        raise RewardError(NO_REWARDS)
    step = AdvantageStep(settings, BatchRows.from_columns(rewards, uids))
    step.check("gdpo")
    return step


def _trained_tokens(response_mask: torch.Tensor, rows: BatchRows) -> torch.Tensor:
    """Return the number of trained tokens of each session, in its last row; else 0."""
    trained_B = count_tokens(response_mask).cpu().numpy()
    return torch.from_numpy(rows.over_sessions(trained_B))


_compared: set[tuple[str, ...]] = set()  # names of rewards whose ranges this process has compared


def _log_small_ranges(step: AdvantageStep) -> None:
    """Log, once for the same rewards, those whose small range was their weight under GRPO."""
    names = tuple(step.rewards.weights)
    if names in _compared:
        return
    _compared.add(names)
    for line in small_ranges(step.rewards, step.settings):
        logger.info("verl-gdpo: %s", line)
