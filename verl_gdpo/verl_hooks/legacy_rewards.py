"""Reads the column of dicts that `agent_loop.py` makes for verl's legacy trainers.

Relies on verl 0.9 `verl.trainer.ppo.reward.extract_reward(batch)`, which returns the scores and
{key: column} for validation and dumps. The trainers import it by name.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from verl.trainer.ppo import reward

from verl_gdpo.batch.rows import ABSENT, as_numbers_or_text, check_names, columns_of


def infos_of(data: Any) -> Sequence[dict[str, Any]] | None:
    """Return verl's reward_extra_info of each row; None for a batch that has columns instead."""
    has_columns = bool(data.meta_info.get("reward_extra_keys"))
    return None if has_columns else data.non_tensor_batch.get("reward_extra_info")


def with_columns(extract_reward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `extract_reward` extended to make columns that verl can average and write.

    It raises RewardError if a sample has a value under a name that verl uses.
    """

    @functools.wraps(extract_reward)
    def extract_with_columns(batch: Any) -> Any:
        scores, columns = extract_reward(batch)
        if (infos := infos_of(batch)) is not None:
            uids = batch.non_tensor_batch["uid"].tolist()
            check_names(infos, uids.__getitem__)
            for name, column in columns_of(infos).items():
                values = [None if value is ABSENT else value for value in column]
                columns[name] = np.array(as_numbers_or_text(values), dtype=object)
        return scores, columns

    return extract_with_columns


reward.extract_reward = with_columns(reward.extract_reward)
