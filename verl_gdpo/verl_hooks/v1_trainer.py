"""Extends verl's V1 trainers, with a mixin in front of each trainer class that verl asks for.

Relies on verl 0.9:
- `get_trainer_cls(mode)`, in both `verl.trainer.ppo.v1` and its `trainer_base`;
- `PPOTrainer._setup`, which makes everything that a trainer needs before its first step;
- the methods in `REQUIRED`, and the tag `response_len`;
- `compute_advantage_for_multi_trajectories`, see `computed_advantages.py`.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import verl
from verl.trainer.ppo import v1
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_gdpo
from verl_gdpo.batch.matrix import EstimatorInput, current_input
from verl_gdpo.batch.metrics import batch_metrics, scoring_metrics, settings_of_advantage
from verl_gdpo.batch.rows import group_of
from verl_gdpo.batch.values import as_json, as_numbers_or_text
from verl_gdpo.rewards import check_ground_truths
from verl_gdpo.run.folder import write_into_run_dir
from verl_gdpo.settings.algorithm import settings_of_run
from verl_gdpo.verl_hooks.checkpoints import mend_tracker
from verl_gdpo.verl_hooks.computed_advantages import forget_outcome, noted_outcome, noting_outcome
from verl_gdpo.verl_hooks.dump_writer import DumpRows
from verl_gdpo.verl_hooks.queue_reader import fetch_rows
from verl_gdpo.verl_hooks.replay_buffer import GdpoBuffer
from verl_gdpo.verl_hooks.reward_manager import node_and_manager, runs_gdpo_manager, scored_rows
from verl_gdpo.verl_hooks.rollout_guard import RolloutGuard, queue_actors, rollout_actors
from verl_gdpo.verl_hooks.rollout_table import RolloutTable

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


# {class of verl: methods that we call or override}
REQUIRED = {
    PPOTrainer: (
        "_init_dataloader",
        "_setup",
        "fit",
        "_build_replay_buffer",
        "_load_checkpoint",
        "_compute_advantage",
        "_log_rollout_data",
        "_dump_generations",
        "_val_metrics_update",
    ),
    ReplayBuffer: (
        "sample",
        "_sync_metadata_from_transfer_queue",
        "_select_prompt_uids",
        "_materialize_batch",
        "_clear_groups",
        "_terminal_eviction_reasons",
        "_sampleable_terminal_keys",
        "_dapo_filtered_keys",
    ),
}


@functools.cache
def with_gdpo(trainer_cls: type) -> type:
    """Return `trainer_cls` extended for GDPO, under the same name.

    verl's `get_trainer_cls` extends every registered class. If you make a trainer in another way,
    write `with_gdpo(MyTrainer)(config)`. A class that is already extended is returned unchanged.
    """
    if issubclass(trainer_cls, GdpoTrainer):
        return trainer_cls
    return type(trainer_cls.__name__, (GdpoTrainer, trainer_cls), {"__module__": __name__})


class GdpoTrainer:
    """Mixin for `PPOTrainer` classes; inactive unless the estimator or the manager is gdpo."""

    config: Any
    global_steps: int
    replay_buffer: Any
    train_dataset: Any
    val_dataset: Any
    reward_loop_manager: Any
    logger: Any

    def __init__(self, config: Any) -> None:
        self.has_manager = runs_gdpo_manager(config)
        self.gdpo = settings_of_run(config, has_manager=self.has_manager)
        self.dump_rows, self.is_dumping_rollouts = DumpRows(), False
        self.rollout_table = RolloutTable.of(config, has_rewards=self.gdpo is not None)
        self.sources: set[str] = set()  # of the training rows, as far as they are known
        if self.gdpo is not None:
            logger.info(
                "verl-gdpo %s replaces the gdpo of verl %s; adv_estimator=%s, "
                "reward manager %s, %s",
                verl_gdpo.__version__,
                verl.__version__,
                config.algorithm.adv_estimator,
                config.reward.reward_manager.name,
                self.gdpo,
            )
        super().__init__(config)  # type: ignore[call-arg]

    def _init_dataloader(self) -> None:
        write_into_run_dir(self.config)
        super()._init_dataloader()  # type: ignore[misc]
        if not self.has_manager or self.config.reward.custom_reward_function.path is not None:
            return
        for key in ("train", "val"):
            rows = scored_rows(getattr(self, f"{key}_dataset"))
            if rows is not None:
                if key == "train":
                    self.sources = {*rows["data_source"]}
                    self.gdpo = settings_of_run(self.config, self.sources, has_manager=True)
                check_ground_truths(rows, f"data.{key}_files")

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        if self.has_manager:
            check_reward_workers(self.reward_loop_manager.reward_loop_workers, self.sources)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        except ray.exceptions.ActorDiedError:
            if self.gdpo is not None:
                self.replay_buffer.guard.raise_if_dead()
            raise

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        if self.gdpo is not None:
            cls = type(buffer)
            buffer.__class__ = type(cls.__name__, (GdpoBuffer, cls), {})
            buffer.known_rows = {}
            self.queue_actors = queue_actors()
            tolerated = self.config.data.train_batch_size - 1
            buffer.guard = RolloutGuard(
                functools.partial(rollout_actors, self), tolerated=tolerated
            )
            is_sync = self.config.trainer.v1.trainer_mode == "sync"
            # full_determinism asks for runs that can be repeated; asynchronous runs cannot
            buffer.in_rounds = is_sync and self.config.actor_rollout_ref.rollout.full_determinism
            if self.config.algorithm.adv_estimator == "gdpo":
                buffer.filter_by(self.gdpo)
        return buffer

    def _load_checkpoint(self) -> None:
        if self.gdpo is not None and self.config.trainer.resume_mode == "auto":
            mend_tracker(Path(self.config.trainer.default_local_dir))
        super()._load_checkpoint()  # type: ignore[misc]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.gdpo is None:
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        known = self.replay_buffer.known_rows
        rows = fetch_rows(batch.keys, batch.partition_id, batch.tags, known)
        known.clear()
        rows = replace(rows, step=self.global_steps)
        given = EstimatorInput(rows, self.gdpo)
        rewards = given.rewards  # raises if a reward is missing, whichever estimator runs
        forget_outcome()
        token = current_input.set(given)
        try:
            result = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        finally:
            current_input.reset(token)
        settings = settings_of_advantage(self.config.algorithm.adv_estimator, self.gdpo)
        lengths = np.array([tag["response_len"] for tag in batch.tags])
        if settings is not None and settings.batch_norm == "token":
            lengths = noted_outcome().trained_B  # rollout correction has changed the masks
        groups = [group_of(key) for key in batch.keys]
        self.sources.update(rows.sources)
        sources = rows.sources if len(self.sources) > 1 else None
        metrics.update(scoring_metrics(rows))
        metrics.update(
            batch_metrics(
                rewards, rows.counted_B, groups, lengths, settings, self.gdpo.bounds, sources
            )
        )
        if self.config.trainer.get("rollout_data_dir"):
            self.dump_rows.add(batch, rows, noted_outcome())
        return result

    def _log_rollout_data(self, *args: Any, **kwargs: Any) -> None:
        self.is_dumping_rollouts = self.gdpo is not None
        try:
            super()._log_rollout_data(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.is_dumping_rollouts = False
            self.dump_rows.clear()

    def _dump_generations(
        self, *, reward_extra_infos_dict: dict[str, list[Any]], **kwargs: Any
    ) -> None:
        columns = reward_extra_infos_dict
        if self.is_dumping_rollouts:
            ours = self.dump_rows.columns(columns["uid"])
            columns = {**columns, **ours}
            if self.rollout_table is not None:
                texts = kwargs["inputs"], kwargs["outputs"]
                self.rollout_table.log(self.logger.logger, self.global_steps, *texts, ours)
        elif self.gdpo is not None:  # validation
            columns = {str(name): [*map(as_json, values)] for name, values in columns.items()}
        super()._dump_generations(  # type: ignore[misc]
            reward_extra_infos_dict=columns, **kwargs
        )

    def _val_metrics_update(
        self, sources: Any, uids: Any, infos: dict[str, list[Any]], *args: Any, **kwargs: Any
    ) -> Any:
        if self.gdpo is not None:
            infos = {name: as_numbers_or_text(column) for name, column in infos.items()}
        return super()._val_metrics_update(  # type: ignore[misc]
            sources, uids, infos, *args, **kwargs
        )


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


def extending(get_trainer_cls: Callable[..., type]) -> Callable[..., type]:
    """Return `get_trainer_cls` changed to extend each class that it returns."""

    @functools.wraps(get_trainer_cls)
    def get_extended_trainer_cls(*args: Any, **kwargs: Any) -> type:
        return with_gdpo(get_trainer_cls(*args, **kwargs))

    return get_extended_trainer_cls


def refusing_unextended(setup: Callable[..., None]) -> Callable[..., None]:
    """Return `PPOTrainer._setup` changed to refuse a trainer that is not extended.

    Such a trainer would train on 0 where a reward could not be computed.
    """

    @functools.wraps(setup)
    def check_and_set_up(self: Any) -> None:
        if not isinstance(self, GdpoTrainer):
            has_manager = runs_gdpo_manager(self.config)
            if settings_of_run(self.config, has_manager=has_manager) is not None:
                name = type(self).__name__
                raise RuntimeError(
                    f"gdpo: the trainer {type(self).__module__}.{name} is not extended by "
                    "verl-gdpo. Make it as "
                    f"verl_gdpo.verl_hooks.v1_trainer.with_gdpo({name})(config), or register it "
                    "with verl's register_trainer and get it from get_trainer_cls"
                )
        setup(self)

    return check_and_set_up


def check_verl() -> None:
    """Raise ImportError if verl lacks a method in `REQUIRED`."""
    for cls, names in REQUIRED.items():
        for name in names:
            if not hasattr(cls, name):
                raise ImportError(f"{cls.__module__}.{cls.__name__} has no method {name}")


check_verl()
trainer_base.get_trainer_cls = v1.get_trainer_cls = extending(trainer_base.get_trainer_cls)
PPOTrainer._setup = refusing_unextended(PPOTrainer._setup)
trainer_base.compute_advantage_for_multi_trajectories = noting_outcome(
    trainer_base.compute_advantage_for_multi_trajectories
)
