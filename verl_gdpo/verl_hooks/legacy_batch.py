"""Reads rewards from the batches of verl's legacy trainers, and adds them to metrics and dumps.

Relies on these functions of verl 0.9, which the trainers import by name:
- `verl.trainer.ppo.reward.extract_reward(batch)`, which returns the scores and {key: column} for
  validation and dumps;
- in `verl.trainer.ppo.metric_utils`: `compute_data_metrics(batch)`, and
  `process_validation_metrics(data_sources, sample_uids, infos_dict)`, which handles each column of
  `infos_dict` separately.

The replacements are plain functions. Ray can pickle them even if a user's `__main__` holds them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import verl
from packaging.version import Version

from verl_gdpo.batch.rows import ABSENT, as_numbers_or_text, check_names, columns_of

METRICS_KEY = "gdpo_metrics"  # the key in `meta_info`


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


def with_reward_metrics(compute_data_metrics: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute_data_metrics` extended by the metrics in `meta_info[METRICS_KEY]`."""

    @functools.wraps(compute_data_metrics)
    def compute_all_metrics(batch: Any, *args: Any, **kwargs: Any) -> Any:
        metrics = compute_data_metrics(batch, *args, **kwargs)
        return {**metrics, **batch.meta_info.get(METRICS_KEY, {})}

    return compute_all_metrics


def present_only(process_validation_metrics: Callable[..., Any]) -> Callable[..., Any]:
    """Return `process_validation_metrics` changed to ignore None in each column."""

    @functools.wraps(process_validation_metrics)
    def process_what_is_present(
        data_sources: Sequence[str],
        sample_uids: Sequence[str],
        infos_dict: Mapping[str, Sequence[Any]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with_gaps = [name for name, column in infos_dict.items() if any(v is None for v in column)]
        whole = {name: column for name, column in infos_dict.items() if name not in with_gaps}
        result = process_validation_metrics(data_sources, sample_uids, whole, *args, **kwargs)
        for name in with_gaps:
            rows = [i for i, value in enumerate(infos_dict[name]) if value is not None]
            part = process_validation_metrics(
                [data_sources[i] for i in rows],
                [sample_uids[i] for i in rows],
                {name: [infos_dict[name][i] for i in rows]},
                *args,
                **kwargs,
            )
            for source, metrics in part.items():
                result[source].update(metrics)
        return result

    return process_what_is_present


def extend_reward(reward: Any) -> None:
    reward.extract_reward = with_columns(reward.extract_reward)


def extend_metrics(verls: Any) -> None:
    verls.compute_data_metrics = with_reward_metrics(verls.compute_data_metrics)
    if Version(verl.__version__) < Version("0.9.1"):  # 0.9.0 cannot average None
        verls.process_validation_metrics = present_only(verls.process_validation_metrics)
