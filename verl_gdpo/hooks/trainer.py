"""What we do in verl's V1 trainers, and what we keep for any trainer of a run with gdpo.

Relies on verl 0.9:
- `PPOTrainer(config)`, which makes the replay buffer;
- `PPOTrainer._setup`, which makes everything that a trainer needs before its first step;
- the methods in the table of `plugin.py`, and the tag `response_len`;
- `compute_advantage_for_multi_trajectories(data, ...)` of `v1.utils`, which returns `data` with the
  tensors `advantages` and `response_mask` of all rows, in the order of the batch.
V1 and legacy trainers both have:
- `config`, `global_steps`, `train_dataset` and `val_dataset`;
- `_dump_generations(*, reward_extra_infos_dict, ...)`, which both call with keywords;
- `_val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, ...)`.
"""

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import verl
from omegaconf import OmegaConf

import verl_gdpo
from verl_gdpo.algorithm.failed_samples import empty_dropped
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import (
    AGENT_SCORE_KEY,
    NOTES_KEY,
    RUBRIC_KEY,
    as_json,
    as_numbers_or_text,
)
from verl_gdpo.hooks.before_training import (
    check_reward_workers,
    runs_gdpo_manager,
    scored_rows,
    training_sources,
)
from verl_gdpo.hooks.configuration import (
    has_gdpo,
    has_own_scorer,
    paid_failures,
    settings_of_run,
    warn_once,
)
from verl_gdpo.hooks.extend import Function, extend_instance, record_of
from verl_gdpo.hooks.refusal import raise_refusals
from verl_gdpo.hooks.replay_buffer import BufferRecord, fetch_rows, zero_masks
from verl_gdpo.hooks.rollout_guard import (
    RolloutGuard,
    naming_the_dead,
    queue_actors,
    rollout_actors,
)
from verl_gdpo.hooks.step import AdvantageStep, DumpRows, TokenAdvantages, current_step
from verl_gdpo.scoring.function_list import check_sources
from verl_gdpo.tasks import check_ground_truths

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

# whether a trainer with gdpo averages its validation in this context
averages_ours: ContextVar[bool] = ContextVar("verl_gdpo_averages_ours", default=False)


@dataclass(eq=False)
class TrainerRecord:
    """Beside a trainer whose estimator or reward manager is gdpo."""

    settings: GdpoSettings
    has_manager: bool
    sources: set[str] = field(default_factory=set)  # of the training rows, as far as known
    dump_rows: DumpRows = field(default_factory=DumpRows)
    is_dumping_rollouts: bool = False
    queue_actors: dict[str, Any] = field(default_factory=dict)  # of V1
    ended_by: Exception | None = None  # of the rollouter of fully_async_policy
    busy: set[str] = field(default_factory=set)  # see `extend.py`

    @classmethod
    def of(cls, config: Any) -> "TrainerRecord | None":
        """Check the configuration; return the record of a new trainer, or None without gdpo.

        Raises:
            RuntimeError: gdpo cannot run.
            ValueError: see `settings_of_run`.
        """
        has_manager = runs_gdpo_manager(config)
        is_ours = has_manager or has_gdpo(config)
        sources = training_sources(config) if is_ours else None
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
        config = trainer.config
        if not self.has_manager:
            return
        if has_own_scorer(config):
            self.check_listed_sources(trainer)
            return
        for key in ("train", "val"):
            rows = scored_rows(getattr(trainer, f"{key}_dataset"))
            if rows is not None:
                if key == "train":
                    self.sources = {*rows["data_source"]}
                    settings = settings_of_run(config, self.sources, has_manager=True)
                    self.settings = settings or self.settings
                    warn_of_paid_failures(config, self.settings)
                check_ground_truths(rows, f"data.{key}_files")

    def check_listed_sources(self, trainer: Any) -> None:
        """Compare the `sources` of the list with the rows; see `check_sources`."""
        sources: set[str] = set()
        for dataset in (trainer.train_dataset, trainer.val_dataset):
            rows = scored_rows(dataset)
            if rows is None:
                return
            sources.update(map(str, rows.unique("data_source")))
        for warning in check_sources(trainer.config, sources):
            logger.warning("verl-gdpo: %s", warning)

    def keep(self, trainer: Any, step: AdvantageStep, lengths: Sequence[int]) -> dict[str, float]:
        """Keep a batch for the dump, and return its metrics.

        Args:
            step: with its advantages.
            lengths: of each response, in tokens.
        """
        if trainer.config.trainer.get("rollout_data_dir"):
            self.dump_rows.add(lengths, step)
        self.sources.update(step.rows.sources)
        estimator = trainer.config.algorithm.adv_estimator
        return step.metrics(estimator, lengths, by_source=len(self.sources) > 1)


def warn_of_paid_failures(config: Any, settings: GdpoSettings) -> None:
    """Log, in the trainer's process alone, where failing a condition pays as the user wants it."""
    for paid in paid_failures(config, settings):
        warn_once(paid)


# --- V1 trainers --------------------------------------------------------------------------------


def construct(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend a new trainer if its configuration has gdpo.

    One whose constructor hands on something else than verl's configuration is made as it is.
    """
    (config, *_) = (*args, kwargs.get("config"))
    if OmegaConf.is_config(config):
        record = TrainerRecord.of(config)
        if record is not None:
            extend_instance(self, "PPOTrainer", record)
    original(self, *args, **kwargs)


def set_up(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask the reward workers; refuse a trainer that is not extended.

    It would train on 0 where a reward is not known.
    """
    record = record_of(self)
    if record is None and TrainerRecord.of(self.config):
        raise RuntimeError(
            f"gdpo: the trainer {type(self).__module__}.{type(self).__name__} is not extended by "
            "verl-gdpo, because its constructor did not call that of verl's PPOTrainer with "
            "verl's configuration"
        )
    if record is None:
        return original(self, *args, **kwargs)
    with naming_the_dead(self):  # memory may end while the model is loaded
        result = original(self, *args, **kwargs)
    if record.has_manager:
        check_reward_workers(self.reward_loop_manager.reward_loop_workers, record.sources)
    return result


def init_dataloader(original: Function, self: Any) -> None:
    """Check the rows before a model is loaded."""
    original(self)
    record_of(self).check_rows(self)


def fit(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Name the actor that died."""
    with naming_the_dead(self):
        original(self, *args, **kwargs)


def build_replay_buffer(original: Function, self: Any) -> Any:
    """Extend the new buffer."""
    buffer, record = original(self), record_of(self)
    record.queue_actors = queue_actors()
    tolerated = self.config.data.train_batch_size - 1
    guard = RolloutGuard(functools.partial(rollout_actors, self), tolerated=tolerated)
    is_sync = self.config.trainer.v1.trainer_mode == "sync"
    # full_determinism asks for runs that can be repeated; asynchronous runs cannot
    in_rounds = is_sync and self.config.actor_rollout_ref.rollout.full_determinism
    samples = self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n
    of_buffer = BufferRecord(guard, in_rounds=in_rounds, samples=samples)
    if self.config.algorithm.adv_estimator == "gdpo":
        of_buffer.filter_by(record.settings, getattr(buffer, "filter_groups_metric", None))
    extend_instance(buffer, "ReplayBuffer", of_buffer)
    return buffer


def compute_advantage(original: Function, self: Any, batch: Any, metrics: dict[str, Any]) -> Any:
    """Open a step, and keep what comes of it."""
    record, known = record_of(self), record_of(self.replay_buffer).known_rows
    rows = fetch_rows(batch.keys, batch.partition_id, batch.tags, known)
    known.clear()
    with AdvantageStep(record.settings, replace(rows, step=self.global_steps)) as step:
        step.check(self.config.algorithm.adv_estimator)
        zero_masks(batch, step.rows.is_padding_B & ~rows.is_padding_B)
        result = original(self, batch, metrics)
    metrics.update(record.keep(self, step, [tag["response_len"] for tag in batch.tags]))
    return result


def compute_and_note(original: Function, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the advantages to the step of our trainers.

    To get the same numbers later, we would have to fetch two columns of tokens from TransferQueue.
    """
    if (step := current_step()) is not None:
        # dropped rows are groups of their own, as verl's estimators look at all rows of a group
        uids = data.non_tensor_batch["uid"]
        data.non_tensor_batch["uid"] = np.where(step.rows.is_padding_B, step.keys, uids)
    data = original(data, *args, **kwargs)
    if step is not None:
        step.advantages = TokenAdvantages.of(data.batch)
    return data


# --- any trainer --------------------------------------------------------------------------------


def log_rollout_data(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Let `dump_generations` know the rows of a step from those of validation."""
    record = record_of(self)
    record.is_dumping_rollouts = True
    try:
        original(self, *args, **kwargs)
    finally:
        record.is_dumping_rollouts = False


def dump_generations(
    original: Function, self: Any, *, reward_extra_infos_dict: dict[str, list[Any]], **kwargs: Any
) -> None:
    """Add our columns to the rows of a step."""
    record, columns = record_of(self), reward_extra_infos_dict
    if record.is_dumping_rollouts:
        columns = {**columns, **record.dump_rows.columns(columns["uid"])}
    else:  # validation
        columns = {
            str(name): [as_json(value, str(name)) for value in values]
            for name, values in columns.items()
            if name not in (NOTES_KEY, AGENT_SCORE_KEY)
        }
    original(self, reward_extra_infos_dict=columns, **kwargs)


def update_validation_metrics(
    original: Function,
    self: Any,
    sources: Any,
    uids: Any,
    infos: dict[str, list[Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Leave out what is not a reward, dropped samples, and those to which `acc` does not apply."""
    empty_dropped(infos)
    infos = {
        name: as_numbers_or_text(column)
        for name, column in infos.items()
        if name not in (NOTES_KEY, AGENT_SCORE_KEY) and not str(name).startswith(RUBRIC_KEY)
    }
    if expected := kwargs.get("expected_acc_counts"):  # since verl 0.9.1
        # verl takes a missing `acc` for a session that failed, and counts it as 0
        absent = Counter(
            (str(source), str(uid))
            for source, uid, acc in zip(sources, uids, infos.get("acc", ()), strict=False)
            if acc is None
        )
        counts = {key: count - absent[key] for key, count in expected.items()}
        kwargs["expected_acc_counts"] = counts
    token = averages_ours.set(True)
    try:
        return original(self, sources, uids, infos, *args, **kwargs)
    finally:
        averages_ours.reset(token)
