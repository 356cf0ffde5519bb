"""What our part of a trainer does, whichever of verl's trainers it extends.

Relies on verl 0.9, whose V1 and legacy trainers both have:
- `config`, `global_steps`, `train_dataset` and `val_dataset`;
- `_dump_generations(*, reward_extra_infos_dict, ...)`, which both call with keywords;
- `_val_metrics_update(data_sources, sample_uids, reward_extra_infos_dict, ...)`.
`RLHFDataset.dataframe` is a table of Hugging Face's `datasets`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import verl

import verl_gdpo
from verl_gdpo.algorithm.samples import AGENT_SCORE_KEY, NOTES_KEY, as_json, as_numbers_or_text
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.hooks.dump_writer import DumpRows, RolloutTable
from verl_gdpo.hooks.step import Step
from verl_gdpo.tasks import check_ground_truths

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


class TrainerMixin:
    """In front of the class of a trainer whose estimator or reward manager is gdpo."""

    has_tracker = True  # of verl's, which can log tables
    config: Any
    global_steps: int
    logger: Any
    train_dataset: Any
    val_dataset: Any
    gdpo: GdpoSettings
    has_manager: bool
    sources: set[str]  # of the training rows, as far as they are known
    rollout_table: RolloutTable | None
    dump_rows: DumpRows
    is_dumping_rollouts: bool

    @classmethod
    def in_front_of(cls, trainer_cls: type) -> type:
        """Return a class of the same name, with this one in front."""
        if issubclass(trainer_cls, cls):
            return trainer_cls
        return type(trainer_cls.__name__, (cls, trainer_cls), {"__module__": cls.__module__})

    @classmethod
    def first_state(cls, config: Any) -> dict[str, Any] | None:
        """Check the configuration; return the attributes of a new trainer, or None without gdpo.

        Raises:
            ValueError: see `settings_of_run` and `RolloutTable.of`.
        """
        # imported late: importing verl's legacy trainer must not import its reward loop
        from verl_gdpo.hooks.reward_manager import runs_gdpo_manager

        has_manager = runs_gdpo_manager(config)
        settings = settings_of_run(config, has_manager=has_manager)
        table = RolloutTable.of(config, has_rewards=cls.has_tracker and settings is not None)
        if settings is None:
            return None
        logger.info(
            "verl-gdpo %s replaces the gdpo of verl %s; adv_estimator=%s, reward manager %s, %s",
            verl_gdpo.__version__,
            verl.__version__,
            config.algorithm.adv_estimator,
            config.reward.reward_manager.name,
            settings,
        )
        return {
            "gdpo": settings,
            "has_manager": has_manager,
            "sources": set(),
            "rollout_table": table,
            "dump_rows": DumpRows(),
            "is_dumping_rollouts": False,
        }

    def check_rows(self) -> None:
        """Check the rows that our scorers will score, and learn the bounds of their rewards.

        Raises:
            ValueError: names the row whose ground truth cannot be read.
        """
        if not self.has_manager or self.config.reward.custom_reward_function.path is not None:
            return
        for key in ("train", "val"):
            rows = _scored_rows(getattr(self, f"{key}_dataset"))
            if rows is not None:
                if key == "train":
                    self.sources = {*rows["data_source"]}
                    settings = settings_of_run(self.config, self.sources, has_manager=True)
                    self.gdpo = settings or self.gdpo
                check_ground_truths(rows, f"data.{key}_files")

    def record(self, step: Step, lengths: Sequence[int]) -> dict[str, float]:
        """Keep a batch for the dump, and return its metrics.

        Args:
            step: with its outcome.
            lengths: of each response, in tokens.
        """
        if self.config.trainer.get("rollout_data_dir"):
            self.dump_rows.add(lengths, step)
        self.sources.update(step.rows.sources)
        estimator = self.config.algorithm.adv_estimator
        return step.metrics(estimator, lengths, by_source=len(self.sources) > 1)

    def _log_rollout_data(self, *args: Any, **kwargs: Any) -> None:
        self.is_dumping_rollouts = True  # those of a step, and not of validation
        try:
            super()._log_rollout_data(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.is_dumping_rollouts = False

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
        else:  # validation
            columns = {
                str(name): [*map(as_json, values)]
                for name, values in columns.items()
                if name not in (NOTES_KEY, AGENT_SCORE_KEY)
            }
        super()._dump_generations(  # type: ignore[misc]
            reward_extra_infos_dict=columns, **kwargs
        )

    def _val_metrics_update(
        self, sources: Any, uids: Any, infos: dict[str, list[Any]], *args: Any, **kwargs: Any
    ) -> Any:
        infos = {
            name: as_numbers_or_text(column)
            for name, column in infos.items()
            if name not in (NOTES_KEY, AGENT_SCORE_KEY)
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
        return super()._val_metrics_update(  # type: ignore[misc]
            sources, uids, infos, *args, **kwargs
        )


def _scored_rows(dataset: Any) -> Any | None:
    """The columns that say how rows are scored; None for a dataset class without such a table."""
    table = getattr(dataset, "dataframe", None)
    columns = ["data_source", "reward_model"]
    has_them = {*columns} <= {*getattr(table, "column_names", ())}
    return table.select_columns(columns) if has_them else None  # type: ignore[union-attr]
