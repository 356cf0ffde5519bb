"""Extends verl's V1 trainers when they are made.

Relies on verl 0.9:
- `PPOTrainer(config)`, which makes the replay buffer;
- `PPOTrainer._setup`, which makes everything that a trainer needs before its first step;
- the methods in `relied_on.py`, and the tag `response_len`;
- `trainer_base.compute_advantage_for_multi_trajectories(data, ...)`, which returns `data` with the
  tensors `advantages` and `response_mask` of all rows, in the order of the batch. It calls the
  `compute_advantage` of `v1.utils`.
"""

import functools
import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray
from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import trainer_base, utils
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_gdpo
from verl_gdpo.hooks.extend import Function, extends
from verl_gdpo.hooks.replay_buffer import GdpoBuffer, fetch_rows
from verl_gdpo.hooks.reward_manager import node_and_manager
from verl_gdpo.hooks.rollout_guard import RolloutGuard, queue_actors, rollout_actors
from verl_gdpo.hooks.step import Outcome, Step, current_step
from verl_gdpo.hooks.trainer_mixin import TrainerMixin
from verl_gdpo.run.folder import write_into_run_dir


class GdpoTrainer(TrainerMixin):
    """Mixin for `PPOTrainer` classes, of which a run with gdpo makes its trainer an instance."""

    replay_buffer: Any
    reward_loop_manager: Any

    def _init_dataloader(self) -> None:
        super()._init_dataloader()  # type: ignore[misc]
        self.check_rows()

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        if self.has_manager:
            check_reward_workers(self.reward_loop_manager.reward_loop_workers, self.sources)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        except ray.exceptions.RayError:  # also of a rank whose peer was on a node that died
            self.replay_buffer.guard.raise_if_node_died()
            raise

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        cls = type(buffer)
        buffer.__class__ = type(cls.__name__, (GdpoBuffer, cls), {})
        buffer.known_rows = {}
        self.queue_actors = queue_actors()
        tolerated = self.config.data.train_batch_size - 1
        buffer.guard = RolloutGuard(functools.partial(rollout_actors, self), tolerated=tolerated)
        is_sync = self.config.trainer.v1.trainer_mode == "sync"
        # full_determinism asks for runs that can be repeated; asynchronous runs cannot
        buffer.in_rounds = is_sync and self.config.actor_rollout_ref.rollout.full_determinism
        if self.config.algorithm.adv_estimator == "gdpo":
            buffer.filter_by(self.gdpo)
        return buffer

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        known = self.replay_buffer.known_rows
        rows = fetch_rows(batch.keys, batch.partition_id, batch.tags, known)
        known.clear()
        with Step(self.gdpo, replace(rows, step=self.global_steps)) as step:
            step.check(self.config.algorithm.adv_estimator)
            result = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        metrics.update(self.record(step, [tag["response_len"] for tag in batch.tags]))
        return result


def check_reward_workers(workers: Sequence[Any], sources: Iterable[str]) -> None:
    """Ask every reward worker which manager it runs, because a node may lack the package.

    Raises:
        RuntimeError: names the nodes whose reward workers do not run our manager, or cannot score
            rows of these data sources.
    """
    advice = (
        f"Install verl-gdpo=={verl_gdpo.__version__} on every node of the Ray cluster. If "
        "VERL_USE_EXTERNAL_PLUGINS is set there, it must include verl_gdpo"
    )
    try:
        asked = [worker.__ray_call__.remote(node_and_manager, {*sources}) for worker in workers]
        answers = ray.get(asked)
    except ray.exceptions.RayError as error:  # a node without the package cannot answer
        raise RuntimeError(f"a reward worker did not start or answer: {error}. {advice}") from error
    foreign = sorted({node for node, is_ours, _ in answers if not is_ours})
    if foreign:
        raise RuntimeError(
            f"reward.reward_manager: on nodes {foreign} the reward workers do not run the manager "
            f"of verl-gdpo. {advice}"
        )
    for node, _, refusal in answers:
        if refusal:
            raise RuntimeError(f"reward worker on node {node}: {refusal}")


def new_trainer(trainer_cls: type, *args: Any, **kwargs: Any) -> Any:
    """Make a trainer, before its constructor runs: with `GdpoTrainer` in front if gdpo is in use.

    A trainer whose constructor gets something else than verl's configuration is made as it is.
    """
    (config, *_) = (*args, kwargs.get("config"))
    state = GdpoTrainer.first_state(config) if OmegaConf.is_config(config) else None
    if state is None:
        return object.__new__(trainer_cls)
    trainer: Any = object.__new__(GdpoTrainer.in_front_of(trainer_cls))
    vars(trainer).update(state)
    return trainer


@extends(PPOTrainer, "_setup")
def check_and_set_up(setup: Function, self: Any) -> None:
    """Refuse a trainer that is not extended: it would train on 0 where a reward is not known."""
    if not isinstance(self, GdpoTrainer) and GdpoTrainer.first_state(self.config):
        raise RuntimeError(
            f"gdpo: the trainer {type(self).__module__}.{type(self).__name__} is not extended "
            "by verl-gdpo, because it was made without verl's configuration as its first "
            "argument, or as `config`"
        )
    write_into_run_dir(self.config)
    setup(self)


@extends(trainer_base, "compute_advantage_for_multi_trajectories")
def compute_and_note(compute_advantage: Function, data: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the outcome to the step of our trainers.

    To get the same numbers later, we would have to fetch two columns of tokens from TransferQueue.
    """
    data = compute_advantage(data, *args, **kwargs)
    if (step := current_step()) is not None:
        step.outcome = Outcome.of(data.batch)
    return data


PPOTrainer.__new__ = staticmethod(new_trainer)
# the legacy trainer's hook is not on the way of a V1 trainer
utils.compute_advantage = inspect.unwrap(utils.compute_advantage)
