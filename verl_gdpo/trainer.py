"""What GDPO adds to verl's V1 trainers, put in front of each registered trainer class.

Relies on verl 0.9: `trainer_base.TRAINER_REGISTRY`, {mode: class}; the methods that `REQUIRED`
names and `with_gdpo` checks; the tag `response_len`; what `outcome.py` says.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import verl
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

import verl_gdpo
from verl_gdpo.dump_rows import DumpRows
from verl_gdpo.metrics import batch_metrics, settings_of_advantage
from verl_gdpo.outcome import forget_outcome, noted_outcome, noting_outcome
from verl_gdpo.plain import as_json, as_numbers_or_text
from verl_gdpo.queue_rows import fetch_rows
from verl_gdpo.replay_buffer import GdpoBuffer
from verl_gdpo.reward_rows import EstimatorInput, current_input, group_of
from verl_gdpo.rewards import check_ground_truths
from verl_gdpo.settings import settings_of_run, uses_gdpo_manager

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


# called or overridden below, by the class that must have them
REQUIRED = {
    PPOTrainer: (
        "_init_dataloader",
        "_setup",
        "_build_replay_buffer",
        "_compute_advantage",
        "_log_rollout_data",
        "_dump_generations",
        "_val_metrics_update",
    ),
    ReplayBuffer: ("sample", "_terminal_eviction_reasons", "_dapo_filtered_keys"),
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
    replay_buffer: Any
    train_dataset: Any
    val_dataset: Any
    reward_loop_manager: Any

    def __init__(self, config: Any) -> None:
        self.gdpo = settings_of_run(config)
        self.dump_rows, self.is_dumping_rollouts = DumpRows(), False
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
            buffer.known_rows = {}
            if self.config.algorithm.adv_estimator == "gdpo":
                buffer.filter_by(self.gdpo)
        return buffer

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.gdpo is None:
            return super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        known = self.replay_buffer.known_rows
        rows = fetch_rows(batch.keys, batch.partition_id, batch.tags, known)
        known.clear()
        rows = replace(rows, step=self.global_steps)
        given = EstimatorInput(rows, self.gdpo)
        rewards = given.rewards  # whichever estimator runs, they have to be there
        forget_outcome()
        token = current_input.set(given)
        try:
            result = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        finally:
            current_input.reset(token)
        settings = settings_of_advantage(self.config.algorithm.adv_estimator, self.gdpo)
        lengths = np.array([tag["response_len"] for tag in batch.tags])
        if settings is not None and settings.batch_norm == "token":
            lengths = noted_outcome().trained_B  # rejection has changed the masks by now
        groups = [group_of(key) for key in batch.keys]
        bounds = self.gdpo.bounds
        metrics.update(batch_metrics(rewards, rows.counted_B, groups, lengths, settings, bounds))
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
            columns = {**columns, **self.dump_rows.columns(columns["uid"])}
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
trainer_base.compute_advantage_for_multi_trajectories = noting_outcome(
    trainer_base.compute_advantage_for_multi_trajectories
)
