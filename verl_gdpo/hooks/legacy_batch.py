"""Reads rewards from the batches of verl's legacy trainers, and adds them to metrics and dumps.

Relies on these functions of verl 0.9, which the trainers import by name:
- `verl.trainer.ppo.reward.extract_reward(batch)`, which returns the scores and {key: column} for
  validation and dumps;
- in `verl.trainer.ppo.metric_utils`: `compute_data_metrics(batch)`, and
  `process_validation_metrics(data_sources, sample_uids, infos_dict)`, which handles each column of
  `infos_dict` separately.
"""

import inspect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verl_gdpo.algorithm.samples import ABSENT, as_numbers_or_text, check_names, columns_of
from verl_gdpo.hooks.extend import Function, extends

METRICS_KEY = "gdpo_metrics"  # the key in `meta_info`


def infos_of(data: Any) -> Sequence[dict[str, Any]] | None:
    """Return verl's reward_extra_info of each row; None for a batch that has columns instead."""
    has_columns = bool(data.meta_info.get("reward_extra_keys"))
    return None if has_columns else data.non_tensor_batch.get("reward_extra_info")


def extract_with_columns(extract_reward: Function, batch: Any) -> Any:
    """Make columns that verl can average and write.

    It raises RewardError if a sample has a value under a name that verl uses.
    """
    scores, columns = extract_reward(batch)
    if (infos := infos_of(batch)) is not None:
        uids = batch.non_tensor_batch["uid"].tolist()
        check_names(infos, uids.__getitem__)
        for name, column in columns_of(infos).items():
            values = [None if value is ABSENT else value for value in column]
            columns[name] = np.array(as_numbers_or_text(values), dtype=object)
    return scores, columns


def compute_all_metrics(
    compute_data_metrics: Function, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Add the metrics in `meta_info[METRICS_KEY]`."""
    metrics = compute_data_metrics(batch, *args, **kwargs)
    return {**metrics, **batch.meta_info.get(METRICS_KEY, {})}


def process_what_is_present(
    process_validation_metrics: Function,
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Ignore None in each column: those that have values in the same rows go to verl together."""
    present: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
    for name, column in infos_dict.items():
        rows = tuple(i for i, value in enumerate(column) if value is not None)
        present[rows][name] = [column[i] for i in rows]
    result: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for rows, columns in present.items():
        given = ([column[i] for i in rows] for column in (data_sources, sample_uids))
        metrics_of = process_validation_metrics(*given, columns, *args, **kwargs)
        for source, metrics in metrics_of.items():
            result[source].update(metrics)
    return result


def extend_reward(reward: Any) -> None:
    extends(reward, "extract_reward")(extract_with_columns)


def extend_metrics(verls: Any) -> None:
    extends(verls, "compute_data_metrics")(compute_all_metrics)
    # 0.9.0 and 0.10.0.dev cannot average None; 0.9.1 can, since it takes this parameter
    if "expected_acc_counts" not in inspect.signature(verls.process_validation_metrics).parameters:
        extends(verls, "process_validation_metrics")(process_what_is_present)
