"""Adds our metrics to the legacy trainers, and makes validation accept missing rewards.

Relies on two functions in verl 0.9 `verl.trainer.ppo.metric_utils`, which the trainers
import by name: `compute_data_metrics(batch)`, and `process_validation_metrics(data_sources,
sample_uids, infos_dict)`, which handles each column of `infos_dict` separately.

The replacements are plain functions. Ray can pickle them even if a user's `__main__` holds them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verl
from packaging.version import Version
from verl.trainer.ppo import metric_utils

METRICS_KEY = "gdpo_metrics"  # the key in `meta_info`


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


metric_utils.compute_data_metrics = with_reward_metrics(metric_utils.compute_data_metrics)
if Version(verl.__version__) < Version("0.9.1"):  # 0.9.0 cannot average None
    metric_utils.process_validation_metrics = present_only(metric_utils.process_validation_metrics)
