"""What we do in verl's legacy trainer (`trainer.use_v1=False`) and the trainers derived from it.

Relies on verl 0.9:
- `ray_trainer.RayPPOTrainer._create_dataloader`: every derived trainer calls it before it loads a
  model, and has set its `config` by then;
- its methods in the table of `plugin.py`; `fit` may return a coroutine, and some derived trainers
  do not call `_get_gen_batch`;
- `ray_trainer.compute_advantage(data, adv_estimator, ..., config)`, which modules of derived
  trainers import by name. The reward columns are in `data.non_tensor_batch`, and
  `meta_info["reward_extra_keys"]` holds their names;
- `reward.extract_reward(batch)`, which returns the scores and {key: column} for validation and
  dumps;
- in `metric_utils`: `compute_data_metrics(batch)`, and `process_validation_metrics(data_sources,
  sample_uids, infos_dict)`, which handles each column of `infos_dict` separately;
- in `verl.experimental.fully_async_policy`: the rollouter, whose `fit` waits for its coroutine
  `_streaming_generation_main` and drops what that raises, as if the training were finished; the
  trainer, which makes no dataloader; and that the run ends with what the `fit` of either raises.
"""

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import ABSENT, BatchRows, RowKey, columns_of
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RewardError, as_numbers_or_text, check_names
from verl_gdpo.hooks import trainer as any_trainer
from verl_gdpo.hooks.agent_loop import IS_OURS
from verl_gdpo.hooks.extend import Function, extend_instance, record_of
from verl_gdpo.hooks.rollout_guard import naming_the_dead
from verl_gdpo.hooks.step import NO_REWARDS, AdvantageStep, TokenAdvantages, fitting
from verl_gdpo.hooks.trainer import TrainerRecord
from verl_gdpo.scoring.function_list import refuse_without_v1

KEYS = "gdpo_keys"  # the column with the keys of the rows, in the form of V1's
METRICS_KEY = "gdpo_metrics"  # the key in `meta_info`

# --- the trainer ---------------------------------------------------------------------------------


def extend(trainer: Any, config: Any) -> TrainerRecord | None:
    """Check the configuration, and extend the trainer; return its record, None without gdpo."""
    record: TrainerRecord | None = record_of(trainer)
    if record is None:
        record = TrainerRecord.of(config)
        if record is not None:
            refuse_without_v1(config)
            extend_instance(trainer, "RayPPOTrainer", record)
    return record


def create_dataloader(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Extend the trainer, and check its rows."""
    record = extend(self, self.config)
    if record is not None and not hasattr(self, "_dump_executor"):  # of one_step_off_policy
        self._init_dump_executor()
    result = original(self, *args, **kwargs)
    if record is not None:
        record.check_rows(self)
    return result


def fit(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let verl's functions know the trainer, and name an actor that died."""
    with _fitting(self):
        result = original(self, *args, **kwargs)
    return _wait(self, result) if inspect.isawaitable(result) else result


async def _wait(trainer: Any, result: Awaitable[Any]) -> Any:
    """Wait for verl's `fit`, and for the dumps, for which a `fit` that can wait does not."""
    with _fitting(trainer):
        try:
            return await result
        finally:
            trainer._shutdown_dump_executor()


@contextmanager
def _fitting(trainer: Any) -> Iterator[None]:
    token = fitting.set(trainer)
    try:
        with naming_the_dead(trainer):
            yield
    finally:
        fitting.reset(token)


def get_gen_batch(original: Function, self: Any, batch: Any) -> Any:
    """Tell the reward manager the step: its weights and scorers may have a schedule."""
    batch = original(self, batch)
    batch.non_tensor_batch["global_steps"] = np.full(len(batch), self.global_steps)
    return batch


def log_rollout_data(
    original: Function, self: Any, batch: Any, infos: dict[str, Any], *args: Any
) -> None:
    """Name the rows by the keys that they had in `compute_in_step`.

    They are not numbered again: the trainer may have left out rows since, or changed their order.
    """
    keys = batch.non_tensor_batch.get(KEYS, batch.non_tensor_batch["uid"]).tolist()
    any_trainer.log_rollout_data(original, self, batch, {**infos, "uid": keys}, *args)


# --- its batches ---------------------------------------------------------------------------------


def compute_in_step(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Open a step, and keep what came of it.

    In a loop of the user's, without a trainer of verl's, this is done for adv_estimator=gdpo alone.
    """
    arguments = inspect.signature(original).bind(*args, **kwargs).arguments
    data, adv_estimator = arguments["data"], arguments["adv_estimator"]
    trainer = fitting.get()
    if trainer is None and adv_estimator != "gdpo":
        return original(*args, **kwargs)
    if adv_estimator == "gdpo":
        refuse_penalty(data)
    settings = record_of(trainer).settings if trainer else settings_of_loop(arguments.get("config"))
    keys = RowKey.of_uids(data.non_tensor_batch["uid"])
    number = trainer.global_steps if trainer else None
    with AdvantageStep(settings, rows_of(data, keys, settings, number)) as step:
        step.check(adv_estimator)
        result = original(*args, **kwargs)
    step.advantages = TokenAdvantages.of(result.batch)
    result.non_tensor_batch[KEYS] = np.array(step.keys, dtype=object)
    lengths = response_lengths(result.batch)
    result.meta_info[METRICS_KEY] = (
        record_of(trainer).keep(trainer, step, lengths)
        if trainer is not None
        else step.metrics(adv_estimator, lengths, by_source=False)
    )
    return result


def settings_of_loop(algorithm: Any) -> GdpoSettings:
    """Return the settings of a loop of the user's, which are checked at each step.

    Raises:
        ValueError: the loop does not pass verl's `algorithm` block.
    """
    if algorithm is None:
        raise ValueError(
            "compute_advantage was called without `config`, so nobody knows algorithm.gdpo. Pass "
            "config=config.algorithm, or call it in the `fit` of a trainer that is derived from "
            "verl's RayPPOTrainer"
        )
    return read_settings(algorithm)


def rows_of(
    data: Any, keys: Sequence[RowKey], settings: GdpoSettings, step: int | None
) -> BatchRows:
    """Return the reward columns of verl's batch as rows.

    Raises:
        RewardError: the batch has no reward.
    """
    batch = data.non_tensor_batch
    infos = infos_of(data)  # rows may have different names, as in V1
    if infos is None:
        names = data.meta_info.get("reward_extra_keys") or settings.names
        columns = {name: batch[name].tolist() for name in names if name in batch}
        if not columns.keys() - {"score"}:
            raise RewardError(NO_REWARDS)
        infos = [
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ]
    sources = [*map(str, batch.get("data_source", [""] * len(keys)))]
    labels = [str(key) for key in keys]
    return BatchRows.of(keys, labels, infos, sources, [False] * len(keys), step)


def response_lengths(tensors: Any) -> list[int]:
    """Return the length of each response in tokens; what tools have answered counts too."""
    mask_BT = tensors["response_mask"]
    if "attention_mask" in tensors:
        mask_BT = tensors["attention_mask"][:, -mask_BT.shape[1] :]
    lengths: list[int] = (mask_BT != 0).sum(dim=1).tolist()
    return lengths


def refuse_penalty(data: Any) -> None:
    """Raise ValueError if a trainer has changed the scores, because gdpo would ignore that."""
    scores, rewards = (data.batch.get(f"token_level_{what}") for what in ("scores", "rewards"))
    if scores is not None and rewards is not scores and not torch.equal(scores, rewards):
        raise ValueError(
            "token_level_rewards differ from token_level_scores with adv_estimator=gdpo: a penalty "
            "was added to the summed reward, such as KL by algorithm.use_kl_in_reward. gdpo would "
            "ignore it. Make the penalty a separate reward, or put it into the loss"
        )


def infos_of(data: Any) -> Sequence[dict[str, Any]] | None:
    """Return verl's reward_extra_info of each row; None for a batch that has columns instead."""
    has_columns = bool(data.meta_info.get("reward_extra_keys"))
    return None if has_columns else data.non_tensor_batch.get("reward_extra_info")


def extract_with_columns(original: Function, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Make columns that verl can average and write; RewardError for a name that verl uses."""
    extracted = original(batch, *args, **kwargs)
    if IS_OURS not in batch.non_tensor_batch:
        return extracted
    scores, columns = extracted
    if (infos := infos_of(batch)) is not None:
        uids = batch.non_tensor_batch["uid"].tolist()
        check_names(infos, uids.__getitem__)
        for name, column in columns_of(infos).items():
            values = [None if value is ABSENT else value for value in column]
            columns[name] = np.array(as_numbers_or_text(values), dtype=object)
    return scores, columns


def compute_all_metrics(original: Function, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the metrics in `meta_info[METRICS_KEY]`."""
    metrics = original(batch, *args, **kwargs)
    ours = getattr(batch, "meta_info", {}).get(METRICS_KEY)
    return metrics if ours is None else {**metrics, **ours}


def leave_out_none(
    original: Function,
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Ignore None in each column of our trainers.

    The columns that have values in the same rows go to verl together.

    verl 0.9.0 and 0.10.0.dev cannot average None; 0.9.1 can, since it takes `expected_acc_counts`.
    """
    can_average_none = "expected_acc_counts" in inspect.signature(original).parameters
    if can_average_none or not any_trainer.averages_ours.get():
        return original(data_sources, sample_uids, infos_dict, *args, **kwargs)
    present: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
    for name, column in infos_dict.items():
        rows = tuple(i for i, value in enumerate(column) if value is not None)
        present[rows][name] = [column[i] for i in rows]
    result: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for rows, columns in present.items():
        of_rows = ([column[i] for i in rows] for column in (data_sources, sample_uids))
        metrics_of = original(*of_rows, columns, *args, **kwargs)
        for source, metrics in metrics_of.items():
            result[source].update(metrics)
    return result


# --- fully_async_policy --------------------------------------------------------------------------


def construct_trainer(
    original: Function, self: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Extend the trainer if gdpo is in use."""
    extend(self, config)
    original(self, config, *args, **kwargs)


async def fit_trainer(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Do what we do in every legacy trainer."""
    if record_of(self) is None:
        return await original(self, *args, **kwargs)
    return await fit(original, self, *args, **kwargs)


async def generate_and_note(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note what ended the generation."""
    try:
        return await original(self, *args, **kwargs)
    except Exception as error:
        if (record := record_of(self)) is not None:
            record.ended_by = error
        raise


async def fit_rollouter(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise what ended the generation."""
    result = await original(self, *args, **kwargs)
    record = record_of(self)
    if record is not None and record.ended_by is not None:
        raise record.ended_by
    return result
