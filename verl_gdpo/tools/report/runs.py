"""One training run: its curves, its configuration, its dumps, and the bounds of its rewards."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.hooks.configuration import scorers_bounds, uses_gdpo_manager
from verl_gdpo.run.dump_reader import data_sources, dump_files, dumps_to_read
from verl_gdpo.run.folder import (
    Metrics,
    curves,
    load_config,
    read_versions,
    training_rewards,
    validation_rewards,
)
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.run.tracker_logs import Logged

Curve = Mapping[int, float]
Read = Callable[["Run"], Curve]
ReadEach = Callable[["Run"], Mapping[str, Curve]]

TRAINED: ReadEach = attrgetter("trained")
TESTED: ReadEach = attrgetter("tested")

SMOOTHED_STEPS = 5


@dataclass(frozen=True)
class Run:
    """One training run: one arm, one seed."""

    folder: Path  # or the file or address that was named
    metrics: Metrics
    config: Any = None  # DictConfig, None where there is none
    versions: Mapping[str, str] = field(default_factory=dict)
    # {reward: (lowest, highest)}, where the configuration or a scorer declares them
    bounds: Mapping[str, Bounds] = field(default_factory=dict)
    label: str = ""  # the tracker's name for it; "" for that of the folder
    tracker: str = "file logger"
    rollouts: Path | None = None  # the folder with its dumps
    scorer: Scorer | None = None  # scores the dumps again

    @property
    def name(self) -> str:
        return self.label or self.folder.resolve().name

    @property
    def arm(self) -> str:
        """`arm` of the recipes, the estimator of a run without it, or else its name."""
        return str(self.setting("arm") or self.setting("algorithm.adv_estimator") or self.name)

    @property
    def last_step(self) -> int:
        return max(self.metrics)

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        return curves(self.metrics)

    @cached_property
    def trained(self) -> Mapping[str, Curve]:
        """Each reward in training."""
        return training_rewards(self.metrics)

    @cached_property
    def tested(self) -> Mapping[str, Curve]:
        """Each reward in validation."""
        return validation_rewards(self.metrics)

    def dumps(self) -> list[Path]:
        """Return its rollout dumps, by step.

        Raises:
            ValueError: there are none.
        """
        if self.rollouts is None:
            raise ValueError("no rollout dump; the end of this page says how to have them")
        return dump_files(self.rollouts)[0]

    def setting(self, key: str) -> Any:
        """A key of the configuration such as `data.seed`; None where there is none."""
        return None if self.config is None else OmegaConf.select(self.config, key)


def run_of(
    logged: Logged,
    source: Path,
    config: Path | None = None,
    rollouts: Path | None = None,
    scorer: Scorer | None = None,
) -> Run:
    """A run with all that is known of it, also from its configuration; see `read_arms`."""
    settings = logged.config if config is None else load_config(config)
    if rollouts is not None:
        dump_files(rollouts)  # raises if the user named a folder without dumps
    if rollouts is None and logged.folder is not None and (logged.folder / "rollouts").is_dir():
        rollouts = logged.folder / "rollouts"
    if rollouts is None and settings is not None:
        named = OmegaConf.select(settings, "trainer.rollout_data_dir")
        rollouts = Path(named) if named and Path(named).is_dir() else None
    return Run(
        source,
        logged.metrics,
        settings,
        {} if logged.folder is None else read_versions(logged.folder),
        bounds_of_run(rollouts, settings),
        logged.name,
        logged.kind,
        rollouts,
        scorer,
    )


def bounds_of_run(rollouts: Path | None, config: Any) -> dict[str, Bounds]:
    """Of each reward of a run, after its condition, as far as they are declared.

    With several data sources also of each "reward (source)": their scorers may disagree.
    """
    if config is None:
        return {}
    sources = None
    if rollouts is not None:
        with suppress(ValueError):  # no dump is complete yet
            sources = data_sources(dumps_to_read(dump_files(rollouts)[0]))
    try:
        bounds = _bounds_of(config, sources)
        if sources is not None and len(sources) > 1:
            for source in sources:
                of_source = _bounds_of(config, {source})
                bounds |= {f"{name} ({source})": pair for name, pair in of_source.items()}
    except ValueError:  # a configuration of another version; nothing trains with it in this one
        return {}
    return bounds


def _bounds_of(config: Any, sources: set[str] | None) -> dict[str, Bounds]:
    has_manager = OmegaConf.select(config, "reward.reward_manager") and uses_gdpo_manager(config)
    declared = scorers_bounds(config, sources) if has_manager else {}
    settings = read_settings(config.algorithm, declared)
    ranges = {name: settings.range_of(name) for name in settings.bounds}
    return {name: pair for name, pair in ranges.items() if pair is not None}


def trailing_mean(curve: Curve, window: int) -> dict[int, float]:
    """At each step the mean of the last `window` values, of fewer at the start or at a gap.

    A step whose own value is NaN stays one.
    """
    values = pd.Series(curve)
    means = values.rolling(window, min_periods=1).mean().where(values.notna())
    return {step: mean for step, mean in means.items()}
