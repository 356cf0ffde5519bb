"""What GDPO adds to verl's V1 trainers, put in front of each trainer class that verl asks for.

Relies on verl 0.9: `get_trainer_cls(mode)`, which `verl.trainer.ppo.v1` and its `trainer_base` both
hold; `PPOTrainer._setup`, which makes all that a trainer needs before its first step; and the
methods that `REQUIRED` names.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
import verl
from verl.trainer.ppo import v1
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_gdpo
from verl_gdpo.metrics import batch_metrics, settings_of_advantage
from verl_gdpo.queue_rows import fetch_dump_columns, fetch_lengths, fetch_rows
from verl_gdpo.replay_buffer import GdpoBuffer
from verl_gdpo.reward_manager import node_and_manager, runs_gdpo_manager
from verl_gdpo.reward_rows import EstimatorInput, current_input, group_of
from verl_gdpo.rewards import check_ground_truths
from verl_gdpo.settings import settings_of_run

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
    ),
    ReplayBuffer: ("sample", "_terminal_eviction_reasons", "_dapo_filtered_keys"),
}


@functools.cache
def with_gdpo(trainer_cls: type) -> type:
    """`trainer_cls` extended for GDPO, under its own name; itself if it is extended already.

    verl's `get_trainer_cls` returns registered classes extended. A trainer that is made in another
    way needs it: `with_gdpo(MyTrainer)(config)`.
    """
    if issubclass(trainer_cls, GdpoTrainer):
        return trainer_cls
    return type(trainer_cls.__name__, (GdpoTrainer, trainer_cls), {"__module__": __name__})


class GdpoTrainer:
    """Mixin for `PPOTrainer` classes. Does nothing when neither estimator nor manager is gdpo."""

    config: Any
    global_steps: int
    train_dataset: Any
    val_dataset: Any
    reward_loop_manager: Any

    def __init__(self, config: Any) -> None:
        self.has_manager = runs_gdpo_manager(config)
        self.gdpo = settings_of_run(config, has_manager=self.has_manager)
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
        if not self.has_manager or self.config.reward.custom_reward_function.path is not None:
            return
        for key in ("train", "val"):
            # a custom dataset class need not have a table, nor one of Hugging Face's
            table: Any = getattr(getattr(self, f"{key}_dataset"), "dataframe", None)
            columns = ["data_source", "reward_model"]
            if {*columns} <= {*getattr(table, "column_names", ())}:
                if key == "train":
                    sources = {*table["data_source"]}
                    self.gdpo = settings_of_run(self.config, sources, has_manager=True)
                check_ground_truths(table.select_columns(columns), f"data.{key}_files")

    def _setup(self) -> None:
        super()._setup()  # type: ignore[misc]
        if self.has_manager:
            check_reward_workers(self.reward_loop_manager.reward_loop_workers)

    def _build_replay_buffer(self) -> Any:
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        if self.gdpo is not None:
            cls = type(buffer)
            buffer.__class__ = type(cls.__name__, (GdpoBuffer, cls), {})
            if self.config.algorithm.adv_estimator == "gdpo":
                buffer.filter_by(self.gdpo)
        return buffer

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
        RuntimeError: names the nodes on which another manager would run instead of ours.
    """
    advice = (
        f"Install verl-gdpo=={verl_gdpo.__version__} on every node of the Ray cluster, and see "
        "that VERL_USE_EXTERNAL_PLUGINS there does not leave it out"
    )
    try:
        answers = ray.get([worker.__ray_call__.remote(node_and_manager) for worker in workers])
    except ray.exceptions.RayError as error:  # a node that lacks the package cannot even be asked
        raise RuntimeError(f"a reward worker did not start or answer: {error}. {advice}") from error
    foreign = sorted({node for node, is_ours in answers if not is_ours})
    if foreign:
        raise RuntimeError(
            f"reward.reward_manager: on nodes {foreign} the reward workers do not run the manager "
            f"of verl-gdpo. {advice}"
        )


def extending(get_trainer_cls: Callable[..., type]) -> Callable[..., type]:
    @functools.wraps(get_trainer_cls)
    def get_extended_trainer_cls(*args: Any, **kwargs: Any) -> type:
        return with_gdpo(get_trainer_cls(*args, **kwargs))

    return get_extended_trainer_cls


def refusing_unextended(setup: Callable[..., None]) -> Callable[..., None]:
    """`PPOTrainer._setup`, which stops where an error of a reward would be trained on as 0."""

    @functools.wraps(setup)
    def check_and_set_up(self: Any) -> None:
        if not isinstance(self, GdpoTrainer):
            has_manager = runs_gdpo_manager(self.config)
            if settings_of_run(self.config, has_manager=has_manager) is not None:
                name = type(self).__name__
                raise RuntimeError(
                    f"gdpo: the trainer {type(self).__module__}.{name} is not extended by "
                    f"verl-gdpo. Make it as verl_gdpo.trainer.with_gdpo({name})(config), or "
                    "register it with verl's register_trainer and get it from get_trainer_cls"
                )
        setup(self)

    return check_and_set_up


def check_verl() -> None:
    """Raise ImportError if verl lacks a method that is overridden here."""
    for cls, names in REQUIRED.items():
        for name in names:
            if not hasattr(cls, name):
                raise ImportError(f"{cls.__module__}.{cls.__name__} has no method {name}")


check_verl()
trainer_base.get_trainer_cls = v1.get_trainer_cls = extending(trainer_base.get_trainer_cls)
PPOTrainer._setup = refusing_unextended(PPOTrainer._setup)
