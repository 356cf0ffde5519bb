"""What we do in verl's V1 trainers.

Relies on verl 0.9:
- `PPOTrainer(config)`, which makes the replay buffer;
- `PPOTrainer._setup`, which makes everything that a trainer needs before its first step;
- the methods in the table of `plugin.py`, and the tag `response_len`;
- `compute_advantage_for_multi_trajectories(data, ...)` of `v1.utils`, which returns `data` with the
  tensors `advantages` and `response_mask` of all rows, in the order of the batch.
"""

import functools
from dataclasses import replace
from typing import Any

import ray
from omegaconf import OmegaConf

from verl_gdpo.hooks.extend import Function, extend_instance, record_of
from verl_gdpo.hooks.replay_buffer import BufferRecord, fetch_rows
from verl_gdpo.hooks.reward_workers import check_reward_workers
from verl_gdpo.hooks.rollout_guard import RolloutGuard, queue_actors, rollout_actors
from verl_gdpo.hooks.step import AdvantageStep, TokenAdvantages, current_step
from verl_gdpo.hooks.trainer_record import TrainerRecord


def construct(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Extend a new trainer if its configuration has gdpo.

    One whose constructor hands on something else than verl's configuration is made as it is.
    """
    (config, *_) = (*args, kwargs.get("config"))
    if OmegaConf.is_config(config):
        record = TrainerRecord.of(config, has_tracker=True)
        if record is not None:
            extend_instance(self, "PPOTrainer", record)
    original(self, *args, **kwargs)


def set_up(original: Function, self: Any) -> None:
    """Ask the reward workers; refuse a trainer that is not extended.

    It would train on 0 where a reward is not known.
    """
    record = record_of(self)
    if record is None and TrainerRecord.of(self.config, has_tracker=True):
        raise RuntimeError(
            f"gdpo: the trainer {type(self).__module__}.{type(self).__name__} is not extended by "
            "verl-gdpo, because its constructor did not call that of verl's PPOTrainer with "
            "verl's configuration"
        )
    original(self)
    if record is not None and record.has_manager:
        check_reward_workers(self.reward_loop_manager.reward_loop_workers, record.sources)


def init_dataloader(original: Function, self: Any) -> None:
    """Check the rows before a model is loaded."""
    original(self)
    record_of(self).check_rows(self)


def fit(original: Function, self: Any, *args: Any, **kwargs: Any) -> None:
    """Name the actor that died."""
    try:
        original(self, *args, **kwargs)
    except ray.exceptions.RayError:  # also of a rank whose peer was on a node that died
        record_of(self.replay_buffer).guard.raise_if_node_died()
        raise


def build_replay_buffer(original: Function, self: Any) -> Any:
    """Extend the new buffer."""
    buffer, record = original(self), record_of(self)
    record.queue_actors = queue_actors()
    tolerated = self.config.data.train_batch_size - 1
    guard = RolloutGuard(functools.partial(rollout_actors, self), tolerated=tolerated)
    is_sync = self.config.trainer.v1.trainer_mode == "sync"
    # full_determinism asks for runs that can be repeated; asynchronous runs cannot
    in_rounds = is_sync and self.config.actor_rollout_ref.rollout.full_determinism
    of_buffer = BufferRecord(guard, in_rounds=in_rounds)
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
        result = original(self, batch, metrics)
    metrics.update(record.keep(self, step, [tag["response_len"] for tag in batch.tags]))
    return result


def compute_and_note(original: Function, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the advantages to the step of our trainers.

    To get the same numbers later, we would have to fetch two columns of tokens from TransferQueue.
    """
    data = original(data, *args, **kwargs)
    if (step := current_step()) is not None:
        step.advantages = TokenAdvantages.of(data.batch)
    return data
