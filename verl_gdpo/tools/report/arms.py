"""Runs grouped by arm, and curves over the seeds of an arm.

Seeds are summed up by the median and the inter-quartile range, as pandas' default (linear)
quantiles give them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from verl_gdpo.run.folder import Metrics, read_config, read_metrics, read_versions

Curve = Mapping[int, float]


@dataclass(frozen=True)
class Run:
    """One training run: one arm, one seed."""

    folder: Path
    metrics: Metrics
    config: Any = None  # DictConfig, None where Hydra left none
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def arm(self) -> str:
        """`arm` of the recipes; the folder's name for a run without it."""
        return str(self.setting("arm") or self.folder.resolve().name)

    def setting(self, key: str) -> Any:
        """A key of the configuration such as `data.seed`; None where there is none."""
        return None if self.config is None else OmegaConf.select(self.config, key)


@dataclass(frozen=True)
class Arm:
    """The runs that differ in their seed alone."""

    name: str
    runs: Sequence[Run]


@dataclass(frozen=True)
class Band:
    """A quantity over the steps: median and quartiles over the runs that have it."""

    steps: list[int]
    median: list[float]
    low: list[float]
    high: list[float]
    runs: int


def read_arms(folders: Sequence[Path]) -> list[Arm]:
    """Read run folders; arms in the order in which they are first named.

    Raises:
        ValueError: a folder is not there, is named twice, or holds no metrics.
    """
    seen: set[Path] = set()
    runs: dict[str, list[Run]] = {}
    for folder in folders:
        if folder.resolve() in seen:
            raise ValueError(f"{folder}: named twice; each run counts once")
        seen.add(folder.resolve())
        run = _read_run(folder)
        runs.setdefault(run.arm, []).append(run)
    return [Arm(name, members) for name, members in runs.items()]


def _read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; expected the folder of a run")
    metrics = read_metrics(folder)
    if not metrics:
        inside = sorted(path.parent.name for path in folder.glob("*/metrics"))
        hint = f"; the runs in it are {inside}: name those" if inside else ""
        raise ValueError(f"{folder}: no step in {folder / 'metrics'}{hint}")
    return Run(folder, metrics, read_config(folder), read_versions(folder))


def over_runs(arm: Arm, read: Callable[[Metrics], Curve], smooth: int = 1) -> Band | None:
    """The band of one quantity over the runs of an arm; None where no run has it.

    Args:
        read: the quantity of one run, {step: value}.
        smooth: each run's curve is first replaced by the mean of its last `smooth` steps.
    """
    curves = [curve for run in arm.runs if (curve := read(run.metrics))]
    return band([trailing_mean(curve, smooth) for curve in curves]) if curves else None


def band(curves: Sequence[Curve]) -> Band:
    """Median and quartiles at each step, over the curves that have a number there; else NaN."""
    values = pd.DataFrame(curves).sort_index(axis=1)  # a row a run, a column a step
    low, median, high = values.quantile([0.25, 0.5, 0.75]).to_numpy().tolist()
    return Band([*values.columns], median, low, high, len(curves))


def trailing_mean(curve: Curve, window: int) -> dict[int, float]:
    """At each step the mean of the last `window` values, of fewer at the start or at a gap.

    A step whose own value is NaN stays one.
    """
    values = pd.Series(curve)
    means = values.rolling(window, min_periods=1).mean().where(values.notna())
    return {step: mean for step, mean in means.items()}
