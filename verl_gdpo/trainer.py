"""What GDPO adds to verl's V1 trainers, put in front of each registered trainer class.

Relies on verl 0.9: `trainer_base.TRAINER_REGISTRY`, {mode: class}; the methods that `REQUIRED`
names and `with_gdpo` checks.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import verl
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

import verl_gdpo
from verl_gdpo.checkpoints import mend_tracker
from verl_gdpo.metrics import batch_metrics, settings_of_advantage
from verl_gdpo.queue_rows import fetch_dump_columns, fetch_lengths, fetch_rows
from verl_gdpo.replay_buffer import GdpoBuffer
from verl_gdpo.reward_rows import EstimatorInput, current_input, group_of
from verl_gdpo.rewards import check_ground_truths
from verl_gdpo.rollout_guard import RolloutGuard, queue_actors, rollout_actors
from verl_gdpo.settings import settings_of_run, uses_gdpo_manager

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


# called or overridden below, by the class that must have them
REQUIRED = {
    PPOTrainer: (
        "_init_dataloader",
        "_setup",
        "_build_replay_buffer",
        "_load_checkpoint",
        "_compute_advantage",
        "_log_rollout_data",
        "_dump_generations",
    ),
    ReplayBuffer: (
        "sample",
        "_sync_metadata_from_transfer_queue",
        "_select_prompt_uids",
        "_materialize_batch",
        "_terminal_eviction_reasons",
        "_sampleable_terminal_keys",
        "_dapo_filtered_keys",
    ),
}


def with_gdpo(trainer_cls: type) -> type:
    """The trainer class that verl runs instead of `trainer_cls`, under the same name.

    Raises:
        ImportError: verl lacks a method that is overridden here.
    """
    for cls, names in REQUIRED.items():
        for name in names:
            if not hasattr(cls, name):
                raise ImportError(f"{cls.__module__}.{cls.__name__} has no method {name}")
    return type(trainer_cls.__name__, (GdpoTrainer, trainer_cls), {"__module__": __name__})


class GdpoTrainer:
    """Mixin for `PPOTrainer` classes. Does nothing when neither estimator nor manager is gdpo."""

    config: Any
    global_steps: int
    train_dataset: Any
    val_dataset: Any
    reward_loop_manager: Any

    def __init__(self, config: Any) -> None:
        self.gdpo = settings_of_run(config)
        self.dump_columns: dict[str, dict[str, Any]] | None = None  # by row key, while dumping
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
        super()._init_dataloader()  # type: ignore[misc]
        ours = uses_gdpo_manager(self.config)
        if not ours or self.config.reward.custom_reward_function.path is not None:
            return
        for key in ("train", "val"):
            # a custom dataset class need not have a table, nor one of Hugging Face's
            table: Any = getattr(getattr(self, f"{key}_dataset"), "dataframe", None)
            columns = ["data_source", "reward_model"]
            if {*columns} <= {*getattr(table, "column_names", ())}:
                if key == "train":
                    self.gdpo = settings_of_run(self.config, {*table["data_source"]})
                check_ground_truths(table.select_columns(columns), f"data.{key}_files")

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        if uses_gdpo_manager(self.config):
            check_reward_workers(self.reward_loop_manager.reward_loop_workers)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        if self.gdpo is not None:
            cls = type(buffer)
            buffer.__class__ = type(cls.__name__, (GdpoBuffer, cls), {})
            v1 = self.config.trainer.v1
            is_sync = v1.trainer_mode == "sync"
            replaces_failed = not is_sync or v1.sampler.sync_refill_failed_groups
            tolerated = self.config.data.train_batch_size if replaces_failed else 0
            self.queue_actors = queue_actors()
            buffer.guard = RolloutGuard(partial(rollout_actors, self), tolerated=tolerated)
            # verl's switch for runs that can be repeated; asynchronous ones cannot
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
        rows = fetch_rows(batch.keys, batch.partition_id, batch.tags)
        rows = replace(rows, step=self.global_steps)
        given = EstimatorInput(rows, self.gdpo)
        rewards = given.rewards  # whichever estimator runs, they have to be there
        token = current_input.set(given)
        try:
            result = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        finally:
            current_input.reset(token)
        settings = settings_of_advantage(self.config.algorithm.adv_estimator, self.gdpo)
        by_token = settings is not None and settings.batch_norm == "token"
        lengths = fetch_lengths(batch, trained=by_token)  # rejection has changed the masks by now
        groups = [group_of(key) for key in batch.keys]
        bounds = self.gdpo.bounds
        metrics.update(batch_metrics(rewards, rows.counted_B, groups, lengths, settings, bounds))
        return result

    def _log_rollout_data(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        if self.gdpo is not None:
            self.dump_columns = fetch_dump_columns(batch)
        try:
            super()._log_rollout_data(batch, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.dump_columns = None

    def _dump_generations(
        self, *, reward_extra_infos_dict: dict[str, list[Any]], **kwargs: Any
    ) -> None:
        if self.dump_columns is not None:
            rows = [self.dump_columns[key] for key in reward_extra_infos_dict["uid"]]
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            reward_extra_infos_dict = {**reward_extra_infos_dict, **columns}
        super()._dump_generations(  # type: ignore[misc]
            reward_extra_infos_dict=reward_extra_infos_dict, **kwargs
        )


def check_reward_workers(workers: Sequence[Any]) -> None:
    """Ask every reward worker which manager it runs; a node may lack the package.

    Raises:
        RuntimeError: names the nodes on which verl's own manager would run instead of ours.
    """
    advice = (
        f"Install verl-gdpo=={verl_gdpo.__version__} on every node of the Ray cluster, and see "
        "that VERL_USE_EXTERNAL_PLUGINS there does not leave it out"
    )
    try:
        answers = ray.get([worker.__ray_call__.remote(_manager_and_node) for worker in workers])
    except ray.exceptions.RayError as error:  # a node that lacks the package cannot even be asked
        raise RuntimeError(f"a reward worker did not start or answer: {error}. {advice}") from error
    foreign = sorted({node for manager, node in answers if not manager.startswith("verl_gdpo.")})
    if foreign:
        raise RuntimeError(
            f"reward.reward_manager.name=gdpo: on nodes {foreign} the reward workers run verl's "
            f"own manager. {advice}"
        )


def _manager_and_node(worker: Any) -> tuple[str, str]:
    return type(worker.reward_manager).__module__, ray.util.get_node_ip_address()


# under the same names, because verl compares `trainer.v1.trainer_mode` with them
TRAINER_REGISTRY.update({mode: with_gdpo(cls) for mode, cls in TRAINER_REGISTRY.items()})
