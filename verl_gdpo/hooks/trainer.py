"""What we do in verl's V1 trainers, and what we keep for any trainer of a run with gdpo.

Relies on verl 0.9:
- `PPOTrainer(config)`, which makes the replay buffer;
- `PPOTrainer._setup`, which makes everything that a trainer needs before its first step;
- the methods in the table of `plugin.py`, and the tag `response_len`;
- `compute_advantage_for_multi_trajectories(data, batch_keys, adv_estimator, ...)` of `v1.utils`,
  which returns `data` with the tensors `advantages`, `returns` and `response_mask` of all rows, in
  the order of the batch; and `DataProto.select_idxs(rows)`.
V1 and legacy trainers both have:
- `config`, `global_steps`, `tokenizer`, `train_dataset` and `val_dataset`;
- `_dump_generations(reward_extra_infos_dict, ...)`;
- `_val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, ...)`.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import verl
from omegaconf import OmegaConf

import verl_gdpo
from verl_gdpo.algorithm.failed_samples import (
    empty_dropped,
    empty_sums_of_failed,
    refuse_failures,
)
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import (
    NOTES_KEY,
    OF_AGENT_LOOPS,
    RUBRIC_KEY,
    as_json,
    as_numbers_or_text,
)
from verl_gdpo.algorithm.zero import Ints
from verl_gdpo.hooks import net
from verl_gdpo.hooks.advantage_step import AdvantageStep, TokenAdvantages, current_step
from verl_gdpo.hooks.before_training import (
    check_reward_workers,
    runs_gdpo_manager,
    scored_rows,
    training_sources,
)
from verl_gdpo.hooks.call import Call
from verl_gdpo.hooks.configuration import (
    has_gdpo,
    has_own_scorer,
    paid_failures,
    settings_of_run,
    unnamed_rewards,
    warn_once,
)
from verl_gdpo.hooks.dump import DumpRows
from verl_gdpo.hooks.extend import extend_instance, record_of
from verl_gdpo.hooks.first_step import FirstFormats
from verl_gdpo.hooks.refusal import raise_refusals
from verl_gdpo.hooks.replay_buffer import BufferRecord, response_ids, zero_masks
from verl_gdpo.hooks.rollout_guard import (
    RolloutGuard,
    naming_the_dead,
    queue_actors,
    rollout_actors,
)
from verl_gdpo.scoring.function_list import check_sources
from verl_gdpo.tasks import check_ground_truths

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

# What we add to a sample for our trainer alone. Validation neither averages nor writes it.
NOT_IN_VALIDATION = (NOTES_KEY, *OF_AGENT_LOOPS)

# Whether a trainer with gdpo averages its validation in this context.
averages_ours: ContextVar[bool] = ContextVar("verl_gdpo_averages_ours", default=False)


@dataclass(eq=False)
class TrainerRecord:
    """Beside a trainer whose estimator or reward manager is gdpo."""

    settings: GdpoSettings
    has_manager: bool
    sources: set[str] = field(default_factory=set)  # of the training rows, as far as known
    dump_rows: DumpRows = field(default_factory=DumpRows)
    first_formats: FirstFormats = field(default_factory=FirstFormats)
    has_looked_at_names: bool = False
    is_dumping_rollouts: bool = False
    queue_actors: dict[str, Any] = field(default_factory=dict)  # of V1
    has_asked_workers: bool = False  # the reward workers, which manager they have
    is_fitting: bool = False  # whether verl has called our `fit`; of V1, and of the rollouter
    ended_by: Exception | None = None  # of the rollouter of fully_async_policy
    busy: set[tuple[str, str]] = field(default_factory=set)  # see `extend.py`

    @classmethod
    def of(cls, config: Any) -> "TrainerRecord | None":
        """Check the configuration; return the record of a new trainer, or None without gdpo.

        Raises:
            RuntimeError: gdpo cannot run.
            ValueError: see `settings_of_run`.
        """
        has_manager = runs_gdpo_manager(config)
        sources = None
        # A run without gdpo must not wait until its files are read.
        if has_manager or has_gdpo(config):
            sources = training_sources(config)
        settings = settings_of_run(config, sources, has_manager=has_manager)
        if settings is None:
            return None
        raise_refusals()
        warn_of_paid_failures(config, settings)
        logger.info(
            "verl-gdpo %s replaces the gdpo of verl %s; adv_estimator=%s, reward manager %s, %s",
            verl_gdpo.__version__,
            verl.__version__,
            config.algorithm.adv_estimator,
            config.reward.reward_manager.name,
            settings,
        )
        return cls(settings, has_manager)

    def check_rows(self, trainer: Any) -> None:
        """Check the rows that our scorers will score, and learn the bounds of their rewards.

        Raises:
            ValueError: names the row whose ground truth cannot be read, or a function of the list
                for which there is no row.
        """
        # Another reward manager does not call our scorers.
        if not self.has_manager:
            return
        if has_own_scorer(trainer.config):
            self._check_listed_sources(trainer)
            return
        training_rows = scored_rows(trainer.train_dataset)
        if training_rows is not None:
            self._learn_bounds(trainer.config, training_rows)
            check_ground_truths(training_rows, "data.train_files")
        validation_rows = scored_rows(trainer.val_dataset)
        # One that cannot be read would end the run at its first validation, hours later.
        if validation_rows is not None:
            check_ground_truths(validation_rows, "data.val_files")

    def _learn_bounds(self, config: Any, training_rows: Any) -> None:
        """Take the bounds that the scorers of these rows declare, and not those of other tasks."""
        self.sources = set(training_rows["data_source"])
        settings = settings_of_run(config, self.sources, has_manager=True)
        assert settings is not None  # the manager is ours
        self.settings = settings
        warn_of_paid_failures(config, settings)

    def _check_listed_sources(self, trainer: Any) -> None:
        """Compare the `sources` of the list with the rows; see `check_sources`."""
        sources = []
        for dataset in (trainer.train_dataset, trainer.val_dataset):
            rows = scored_rows(dataset)
            # Rows that cannot be looked at may have any source.
            if rows is None:
                return
            sources.append(set(map(str, rows.unique("data_source"))))
        trained, validated = sources
        for warning in check_sources(trainer.config, trained, validated):
            logger.warning("verl-gdpo: %s", warning)

    def ask_reward_workers(self, trainer: Any) -> None:
        """Ask once which manager the trainer's reward workers have; see `check_reward_workers`."""
        if self.has_asked_workers or not self.has_manager:
            return
        # A trainer of the user's may have them elsewhere, and that of fully_async_policy has none.
        manager = getattr(trainer, "reward_loop_manager", None)
        workers = getattr(manager, "reward_loop_workers", None)
        if workers:
            check_reward_workers(workers, self.sources)
            self.has_asked_workers = True

    def keep(
        self,
        trainer: Any,
        step: AdvantageStep,
        lengths: Sequence[int],
        ids_of: Callable[[int], Sequence[int]],
    ) -> dict[str, float]:
        """Return the metrics of a batch, and keep it for the dump.

        Args:
            step: with its advantages.
            lengths: of each response, in tokens.
            ids_of: returns the tokens of a row's response.
        """
        self.look_at_formats(trainer, step.rows, ids_of)
        if self.has_manager:
            self._say_what_has_no_weight(trainer.config, step.rows)
        # After a step with two sources, the curve of one must not end where a step has no other.
        self.sources.update(step.rows.sources)
        estimator = trainer.config.algorithm.adv_estimator
        metrics = step.metrics(estimator, lengths, by_source=len(self.sources) > 1)
        # Without a folder, verl dumps nothing, and batches would be kept for nobody.
        if trainer.config.trainer.get("rollout_data_dir"):
            self.dump_rows.add(lengths, step)
        return metrics

    def look_at_formats(
        self,
        trainer: Any,
        rows: BatchRows,
        ids_of: Callable[[int], Sequence[int]],
        least: int = 1,
    ) -> None:
        """Say it where the `format` of a task is 0 for all of its first samples.

        Args:
            ids_of: returns the tokens of a row's response.
            least: see `FirstFormats.look`.
        """
        # Other reward managers do not call our scorers.
        if not self.has_manager:
            return

        def response_of(row: int) -> str:
            # A trainer of the user's may keep its tokenizer elsewhere.
            tokenizer = getattr(trainer, "tokenizer", None)
            if tokenizer is None:
                return ""
            return str(tokenizer.decode(ids_of(row), skip_special_tokens=False))

        self.first_formats.look(trainer.config, rows, response_of, least)

    def _say_what_has_no_weight(self, config: Any, rows: BatchRows) -> None:
        """Log once, of the first step, which numbers are no part of the sum."""
        if self.has_looked_at_names:
            return
        self.has_looked_at_names = True
        warning = unnamed_rewards(config, self.settings, rows.columns)
        if warning:
            logger.warning("verl-gdpo: %s", warning)


def warn_of_paid_failures(config: Any, settings: GdpoSettings) -> None:
    """Log, in the trainer's process alone, where failing a condition is meant to be better."""
    for paid in paid_failures(config, settings):
        warn_once(paid)


# --- V1 trainers --------------------------------------------------------------------------------


def construct(call: Call) -> Any:
    """Extend a new trainer if its configuration has gdpo.

    One whose constructor hands on something else than verl's configuration is made as it is.
    """
    config = call.get("config")
    # The configuration is refused before verl's constructor has made anything.
    if OmegaConf.is_config(config):
        record = TrainerRecord.of(config)
        if record is not None:
            extend_instance(call.instance, "PPOTrainer", record)
            net.warn_of_idle_rows()
            net.warn_of_idle_methods(call.instance, "PPOTrainer")
    return call.hand_on()


def set_up(call: Call) -> Any:
    """Ask the reward workers; refuse a trainer that is not extended.

    It would train on 0 where a reward is not known.
    """
    trainer = call.instance
    record = record_of(trainer)
    # The record of a new trainer, if its constructor had let us make one.
    if record is None and TrainerRecord.of(trainer.config) is not None:
        name = f"{type(trainer).__module__}.{type(trainer).__name__}"
        raise RuntimeError(
            f"gdpo: the trainer {name} is not extended by verl-gdpo, because its constructor did "
            "not call that of verl's PPOTrainer with verl's configuration"
        )
    if record is None:
        return call.hand_on()
    # Memory may end while the model is loaded, and Ray's error does not name the process.
    with naming_the_dead(trainer):
        result = call.hand_on()
    # The workers exist since verl's own set-up, and no step has been made yet.
    record.ask_reward_workers(trainer)
    return result


def init_dataloader(call: Call) -> Any:
    """Check the rows before a model is loaded."""
    result = call.hand_on()
    record_of(call.instance).check_rows(call.instance)
    return result


def fit(call: Call) -> Any:
    """Name the actor that died."""
    record_of(call.instance).is_fitting = True
    with naming_the_dead(call.instance):
        return call.hand_on()


def build_replay_buffer(call: Call) -> Any:
    """Extend the new buffer."""
    trainer = call.instance
    buffer = call.hand_on()
    record = record_of(trainer)
    record.queue_actors = queue_actors()
    prompts = trainer.config.data.train_batch_size
    rollout = trainer.config.actor_rollout_ref.rollout
    # `full_determinism` asks for runs that can be repeated. Asynchronous runs cannot.
    is_sync = trainer.config.trainer.v1.trainer_mode == "sync"
    of_buffer = BufferRecord(
        RolloutGuard(functools.partial(rollout_actors, trainer), tolerated=prompts - 1),
        in_rounds=is_sync and rollout.full_determinism,
        samples=prompts * rollout.n,
    )

    def look_at_new(rows: BatchRows, partition_id: str) -> None:
        def ids_of(row: int) -> list[int]:
            return response_ids(str(rows.keys[row]), partition_id)

        record.look_at_formats(trainer, rows, ids_of, least=of_buffer.samples)

    of_buffer.look_at_new = look_at_new
    # With another estimator, verl's own rule says which groups give a gradient.
    if trainer.config.algorithm.adv_estimator == "gdpo":
        of_buffer.filter_by(record.settings, getattr(buffer, "filter_groups_metric", None))
    extend_instance(buffer, "ReplayBuffer", of_buffer)
    net.warn_of_idle_methods(buffer, "ReplayBuffer")
    return buffer


def compute_advantage(call: Call) -> Any:
    """Open a step, and keep what comes of it."""
    trainer = call.instance
    batch = call["batch"]
    record = record_of(trainer)
    adv_estimator = trainer.config.algorithm.adv_estimator
    rows = _rows_of_step(trainer, batch)
    net.refuse_foreign_estimator(adv_estimator)
    with AdvantageStep(record.settings, rows) as step:
        step.check(adv_estimator)
        # verl's own padding has no tokens in the loss, and what was dropped just now still has.
        is_dropped_B = step.rows.is_padding_B & ~rows.is_padding_B
        if is_dropped_B.any():
            zero_masks(batch, is_dropped_B)
        with net.naming_verls_estimator():
            result = call.hand_on()
    if adv_estimator == "gdpo" and step.scalars is None:
        net.end_run("get_adv_estimator_fn")
    # verl's own estimators have taken dropped samples for others of their groups.
    if step.advantages is None and is_dropped_B.any() and adv_estimator != "gdpo":
        net.end_run("compute_advantage_for_multi_trajectories")
    # The tokens are in TransferQueue, and the tags tell their number without fetching them.
    lengths = [tag["response_len"] for tag in batch.tags]

    def ids_of(row: int) -> list[int]:
        return response_ids(batch.keys[row], batch.partition_id)

    call["metrics"].update(record.keep(trainer, step, lengths, ids_of))
    return result


def _rows_of_step(trainer: Any, batch: Any) -> BatchRows:
    """Return the rows of a batch.

    Raises:
        RewardError: a sample could not be scored.
        RuntimeError: they came past what we do in the buffer, or in other processes.
    """
    of_buffer = record_of(trainer.replay_buffer)
    if of_buffer is None:
        net.end_run("PPOTrainer._build_replay_buffer")
    rows: BatchRows = of_buffer.take_rows(batch, trainer.global_steps)
    record = record_of(trainer)
    record.ask_reward_workers(trainer)
    if not record.is_fitting:
        net.warn_of("PPOTrainer.fit")
    net.refuse_unmarked_rows(trainer.config, is_marked=bool(rows.rollouts))
    return rows


def compute_and_note(call: Call) -> Any:
    """Add the advantages to the step of our trainers.

    To get the same numbers later, we would have to fetch two columns of tokens from TransferQueue.
    """
    step = current_step()
    # Another trainer of this process, which has no gdpo, calls the same function.
    if step is None:
        net.refuse_v1_without_step()
        return call.hand_on()
    is_padding_B = step.rows.is_padding_B
    # Our estimator knows which rows are samples. verl's own look at all rows of a batch or group.
    if is_padding_B.any() and call["adv_estimator"] != "gdpo":
        data = _of_samples_alone(call, np.flatnonzero(~is_padding_B))
    else:
        data = call.hand_on()
    step.advantages = TokenAdvantages.of(data.batch)
    return data


def _of_samples_alone(call: Call, samples: Ints) -> Any:
    """Let verl compute the advantages of these rows without the others, which get 0."""
    data = call["data"]
    keys = call["batch_keys"]
    keys_of_samples = [keys[row] for row in samples]
    on_samples = call.changed(data=data.select_idxs(samples), batch_keys=keys_of_samples)
    left = on_samples.hand_on()
    for name in ("advantages", "returns"):
        of_samples = left.batch[name]
        of_all = of_samples.new_zeros((len(data), *of_samples.shape[1:]))
        of_all[torch.from_numpy(samples)] = of_samples
        data.batch[name] = of_all
    return data


# --- any trainer --------------------------------------------------------------------------------


def log_rollout_data(call: Call) -> Any:
    """Let `dump_generations` know the rows of a step from those of validation."""
    record = record_of(call.instance)
    # verl writes both kinds of dump by one method, which is not told whose rows it gets.
    record.is_dumping_rollouts = True
    try:
        return call.hand_on()
    finally:
        record.is_dumping_rollouts = False


def dump_generations(call: Call) -> Any:
    """Add our columns to the rows of a step; of validation, write what JSON can hold."""
    record = record_of(call.instance)
    infos: Mapping[str, list[Any]] = call["reward_extra_infos_dict"]
    # After the dump of a validation, verl averages its own columns, so they stay as they are.
    columns: dict[str, list[Any]] = {}
    if record.is_dumping_rollouts:
        columns.update(infos)
        columns.update(record.dump_rows.columns(infos["uid"]))
    else:
        for name, values in infos.items():
            if name not in NOT_IN_VALIDATION:
                columns[str(name)] = [as_json(value, str(name)) for value in values]
    return call.changed(reward_extra_infos_dict=columns).hand_on()


def update_validation_metrics(call: Call) -> Any:
    """Leave out what is not a reward, samples that failed, and those to which `acc` does not apply.

    Raises:
        RewardError: functions failed for more of the samples than `max_failed`.
    """
    infos = call["reward_extra_infos_dict"]
    notes = [of_sample for of_sample in infos.get(NOTES_KEY, ()) if of_sample]
    refuse_failures(notes, record_of(call.instance).settings.max_failed, "of a validation")
    empty_dropped(infos)
    empty_sums_of_failed(infos)
    averaged = {}
    for name, column in infos.items():
        # The criteria of a rubric are no numbers. Its score stands under its own name.
        is_rubric = str(name).startswith(RUBRIC_KEY)
        if name not in NOT_IN_VALIDATION and not is_rubric:
            averaged[name] = as_numbers_or_text(column)
    averaging = call.changed(reward_extra_infos_dict=averaged)
    # verl has this argument since 0.9.1. It is empty, or None, where nothing is expected.
    expected = call.get("expected_acc_counts")
    if expected:
        accuracies = averaged.get("acc", [])
        counts = _that_apply(expected, call["data_sources"], call["sample_uids"], accuracies)
        averaging = averaging.changed(expected_acc_counts=counts)
    token = averages_ours.set(True)
    try:
        return averaging.hand_on()
    finally:
        averages_ours.reset(token)


def _that_apply(
    expected: Mapping[tuple[str, str], int], sources: Any, uids: Any, accuracies: Sequence[Any]
) -> dict[tuple[str, str], int]:
    """Return the counts of sessions by data source and prompt, without those whose `acc` is None.

    verl takes a missing `acc` for a session that failed, and counts it as 0.
    """
    absent: Counter[tuple[str, str]] = Counter()
    # Without any `acc`, there is nothing to compare with, and no count changes.
    for source, uid, accuracy in zip(sources, uids, accuracies, strict=False):
        if accuracy is None:
            absent[str(source), str(uid)] += 1
    return {key: count - absent[key] for key, count in expected.items()}
