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
  sample_uids, infos_dict)`, which handles each column of `infos_dict` separately.

`fully_async.py` has what `verl.experimental.fully_async_policy` needs besides.
"""

import inspect
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from verl_gdpo.algorithm.equation import count_tokens
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import ABSENT, BatchRows, RowKey, columns_of
from verl_gdpo.algorithm.settings import WHERE, GdpoSettings
from verl_gdpo.algorithm.values import (
    NOTES_KEY,
    ROLLOUT_KEY,
    RewardError,
    as_numbers_or_text,
    check_names,
)
from verl_gdpo.hooks import net
from verl_gdpo.hooks import trainer as any_trainer
from verl_gdpo.hooks.advantage_step import AdvantageStep, TokenAdvantages
from verl_gdpo.hooks.agent_loop import INFO, IS_OURS
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.configuration import refuse_group_filter
from verl_gdpo.hooks.estimator import NO_REWARDS, fitting
from verl_gdpo.hooks.extend import extend_instance, record_of
from verl_gdpo.hooks.rollout_guard import naming_the_dead
from verl_gdpo.hooks.trainer import TrainerRecord
from verl_gdpo.scoring.function_list import refuse_without_v1

KEYS = "gdpo_keys"  # The column with the keys of the rows, in the form of V1's.
METRICS_KEY = "gdpo_metrics"  # Where in `meta_info` the metrics of a step wait for verl's.

# --- the trainer ---------------------------------------------------------------------------------


def extend(trainer: Any, config: Any) -> TrainerRecord | None:
    """Check the configuration, and extend the trainer; return its record, None without gdpo."""
    known: TrainerRecord | None = record_of(trainer)
    # A trainer with a curriculum loads its data again.
    if known is not None:
        return known
    record = TrainerRecord.of(config)
    if record is not None:
        refuse_without_v1(config)
        # A trainer of the user's may filter groups itself, as verl's DAPO recipe does.
        if type(trainer).__module__.split(".")[0] == "verl":
            refuse_group_filter(config)
        if record.settings.keep_groups:
            raise ValueError(
                f"{WHERE}.keep_groups={record.settings.keep_groups}: verl's legacy trainers filter "
                "no groups. Leave it out, or take a V1 trainer of verl.trainer.main_ppo "
                "(trainer.use_v1=True)"
            )
        extend_instance(trainer, "RayPPOTrainer", record)
        net.warn_of_idle_rows()
        net.warn_of_idle_methods(trainer, "RayPPOTrainer")
        net.warn_of_idle_actor(trainer)
    return record


def create_dataloader(call: Call) -> Any:
    """Extend the trainer, and check its rows."""
    trainer = call.instance
    record = extend(trainer, trainer.config)
    if record is None:
        return call.hand_on()
    # The trainer of one_step_off_policy makes no executor, and verl's dumps need one.
    if not hasattr(trainer, "_dump_executor"):
        trainer._init_dump_executor()
    result = call.hand_on()
    record.check_rows(trainer)
    return result


def fit(call: Call) -> Any:
    """Let verl's functions know the trainer, and name an actor that died."""
    trainer = call.instance
    record_of(trainer).ask_reward_workers(trainer)
    with _fitting(trainer):
        result = call.hand_on()
    # After a decorator, a coroutine function may not look like one. Its result does.
    if inspect.isawaitable(result):
        return _wait(trainer, result)
    return result


async def _wait(trainer: Any, result: Awaitable[Any]) -> Any:
    """Wait for verl's `fit`, and for the dumps, for which a `fit` that can wait does not."""
    with _fitting(trainer):
        try:
            return await result
        finally:
            trainer._shutdown_dump_executor()


@contextmanager
def _fitting(trainer: Any) -> Iterator[None]:
    """Let verl's functions know the trainer in this context, and name an actor that died."""
    token = fitting.set(trainer)
    try:
        with naming_the_dead(trainer):
            yield
    finally:
        fitting.reset(token)


def get_gen_batch(call: Call) -> Any:
    """Tell the reward manager the step: its weights and scorers may have a schedule."""
    batch = call.hand_on()
    # verl splits the batch among its workers, so that each row has to bring the number.
    batch.non_tensor_batch["global_steps"] = np.full(len(batch), call.instance.global_steps)
    return batch


def log_rollout_data(call: Call) -> Any:
    """Name the rows by the keys that they had in `compute_in_step`.

    They are not numbered again: the trainer may have left out rows since, or changed their order.
    """
    # A batch whose advantages were computed elsewhere has none, and the dump then says so.
    columns = call["batch"].non_tensor_batch
    if KEYS not in columns:
        net.refuse_unseen_batch(call.instance)
    keys = columns.get(KEYS, columns["uid"]).tolist()
    infos_with_keys = dict(call["reward_extra_infos_dict"])
    infos_with_keys["uid"] = keys
    return any_trainer.log_rollout_data(call.changed(reward_extra_infos_dict=infos_with_keys))


# --- its batches ---------------------------------------------------------------------------------


def compute_in_step(call: Call) -> Any:
    """Open a step, and keep what came of it.

    In a loop of the user's, without a trainer of verl's, this is done for adv_estimator=gdpo alone.
    """
    data = call["data"]
    adv_estimator = call["adv_estimator"]
    trainer = fitting.get()
    # A loop of the user's may hand over another object than verl's DataProto.
    columns = getattr(data, "non_tensor_batch", {})
    if trainer is None and (adv_estimator == "gdpo" or IS_OURS in columns):
        net.refuse_unknown_trainer()
    # Nobody has asked us to look at a loop of the user's with another estimator.
    if trainer is None and adv_estimator != "gdpo":
        return call.hand_on()
    # verl's own estimators use the summed reward, with what was added to it.
    if adv_estimator == "gdpo":
        refuse_penalty(data)
    if trainer is not None:
        _refuse_foreign_rows(trainer, columns)
    net.refuse_foreign_estimator(adv_estimator)
    with _step_of(data, trainer, call.get("config")) as step:
        step.check(adv_estimator)
        with net.naming_verls_estimator():
            result = call.hand_on()
    if adv_estimator == "gdpo" and step.scalars is None:
        net.end_run("get_adv_estimator_fn")
    step.advantages = TokenAdvantages.of(result.batch)
    # The dump needs them, and the trainer may leave out rows before it.
    result.non_tensor_batch[KEYS] = np.array(step.keys, dtype=object)
    lengths = response_lengths(result.batch)
    # A loop of the user's has no record that knows the data sources of the steps before.
    if trainer is None:
        metrics = step.metrics(adv_estimator, lengths, by_source=False)
    else:

        def ids_of(row: int) -> list[int]:
            ids: list[int] = data.batch["responses"][row][: lengths[row]].tolist()
            return ids

        metrics = record_of(trainer).keep(trainer, step, lengths, ids_of)
    result.meta_info[METRICS_KEY] = metrics
    return result


def _refuse_foreign_rows(trainer: Any, columns: Mapping[str, Any]) -> None:
    """Raise RuntimeError for rows that came from verl's workers without what ours do there."""
    record_of(trainer).ask_reward_workers(trainer)
    # What `compute_and_mark` adds has become a column like any other.
    if ROLLOUT_KEY in columns:
        net.end_run("AgentLoopWorker._postprocess")
    # Rows of a trainer of the user's may come otherwise.
    if IS_OURS in columns:
        is_marked = any(ROLLOUT_KEY in info for info in columns[INFO])
        net.refuse_unmarked_rows(trainer.config, is_marked=is_marked)


def _step_of(data: Any, trainer: Any, algorithm: Any) -> AdvantageStep:
    """Return the step of a batch, of a trainer or of a loop of the user's (None)."""
    if trainer is None:
        settings = settings_of_loop(algorithm)
        number = None
    else:
        settings = record_of(trainer).settings
        number = trainer.global_steps
    # The rows here have the uid of their prompt alone, and a key also numbers its sessions.
    keys = RowKey.of_uids(data.non_tensor_batch["uid"])
    return AdvantageStep(settings, rows_of(data, keys, settings, number))


def settings_of_loop(algorithm: Any) -> GdpoSettings:
    """Return the settings of a loop of the user's, which are checked at each step.

    Raises:
        ValueError: the loop does not pass verl's `algorithm` block.
    """
    # Defaults in its place would silently ignore the weights of the user.
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
    infos = infos_of(data)
    if infos is None:
        infos = _infos_from_columns(data, settings)
    # A batch of a loop of the user's may say nothing of its sources.
    sources = data.non_tensor_batch.get("data_source", [""] * len(keys))
    return BatchRows.of(
        keys,
        labels=[str(key) for key in keys],
        infos=infos,
        sources=[str(source) for source in sources],
        is_padding=[False] * len(keys),
        step=step,
    )


def infos_of(data: Any) -> Sequence[dict[str, Any]] | None:
    """Return verl's reward_extra_info of each row; None for a batch that has columns instead.

    Rows may have different names, as in V1.
    """
    if data.meta_info.get("reward_extra_keys"):
        return None
    infos: Sequence[dict[str, Any]] | None = data.non_tensor_batch.get("reward_extra_info")
    return infos


def _infos_from_columns(data: Any, settings: GdpoSettings) -> list[dict[str, Any]]:
    """Return {name: value} of each row, of a batch that has a column for each reward.

    Raises:
        RewardError: the batch has no reward.
    """
    batch = data.non_tensor_batch
    names = data.meta_info.get("reward_extra_keys") or settings.names
    columns = {name: batch[name].tolist() for name in names if name in batch}
    # The score by itself is the sum of rewards that nobody has handed over.
    if not columns.keys() - {"score"}:
        raise RewardError(NO_REWARDS)
    infos = []
    for values in zip(*columns.values(), strict=True):
        infos.append(dict(zip(columns, values, strict=True)))
    return infos


def response_lengths(tensors: Any) -> list[int]:
    """Return the length of each response in tokens; what tools have answered counts too."""
    mask_BT = tensors["response_mask"]
    # The response mask leaves out the answers of tools, and the attention mask has the prompt too.
    if "attention_mask" in tensors:
        mask_BT = tensors["attention_mask"][:, -mask_BT.shape[1] :]
    lengths: list[int] = count_tokens(mask_BT).tolist()
    return lengths


def refuse_penalty(data: Any) -> None:
    """Raise ValueError if a trainer has changed the scores, because gdpo would ignore that."""
    scores = data.batch.get("token_level_scores")
    rewards = data.batch.get("token_level_rewards")
    # Most trainers hand over one tensor under both names, which need not be compared.
    if scores is None or rewards is scores:
        return
    if not torch.equal(scores, rewards):
        raise ValueError(
            "token_level_rewards differ from token_level_scores with adv_estimator=gdpo: a penalty "
            "was added to the summed reward, such as KL by algorithm.use_kl_in_reward. gdpo would "
            "ignore it. Make the penalty a separate reward, or put it into the loss"
        )


def extract_with_columns(call: Call) -> Any:
    """Make columns that verl can average and write; RewardError for a name that verl uses."""
    batch = call["batch"]
    extracted = call.hand_on()
    # Another reward manager may return what it likes.
    if IS_OURS not in batch.non_tensor_batch:
        return extracted
    infos = infos_of(batch)
    if infos is None:
        return extracted
    scores, columns = extracted
    uids = batch.non_tensor_batch["uid"].tolist()
    check_names(infos, uids.__getitem__)
    for name, column in columns_of(infos).items():
        # verl knows no value that is absent.
        values = [None if value is ABSENT else value for value in column]
        # The notes of a sample are a dict, which a validation reads and leaves out.
        if name != NOTES_KEY:
            values = as_numbers_or_text(values)
        columns[name] = np.array(values, dtype=object)
    return scores, columns


def compute_all_metrics(call: Call) -> Any:
    """Add the metrics in `meta_info[METRICS_KEY]`."""
    metrics = call.hand_on()
    # A script of the user's may hand over another object than verl's DataProto.
    batch = call["batch"]
    ours = getattr(batch, "meta_info", {}).get(METRICS_KEY)
    if ours is None:
        # The advantages of this batch were computed without us.
        if IS_OURS in getattr(batch, "non_tensor_batch", {}):
            net.refuse_unseen_batch(fitting.get())
        return metrics
    return {**metrics, **ours}


def leave_out_none(call: Call) -> Any:
    """Ignore None in each column of our trainers.

    The columns that have values in the same rows go to verl together.

    verl 0.9.0 and 0.10.0.dev cannot average None; 0.9.1 can, since it takes `expected_acc_counts`.
    """
    can_average_none = call.takes("expected_acc_counts")
    if can_average_none or not any_trainer.averages_ours.get():
        return call.hand_on()
    data_sources = call["data_sources"]
    sample_uids = call["sample_uids"]
    # {rows: the columns that have values in these rows}
    present: defaultdict[tuple[int, ...], dict[str, Any]] = defaultdict(dict)
    for name, column in call["infos_dict"].items():
        rows = tuple(row for row, value in enumerate(column) if value is not None)
        present[rows][name] = [column[row] for row in rows]

    result: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for rows, columns in present.items():
        sources_of_rows = [data_sources[row] for row in rows]
        uids_of_rows = [sample_uids[row] for row in rows]
        of_rows = call.changed(
            data_sources=sources_of_rows, sample_uids=uids_of_rows, infos_dict=columns
        )
        for source, metrics in of_rows.hand_on().items():
            result[source].update(metrics)
    return result
