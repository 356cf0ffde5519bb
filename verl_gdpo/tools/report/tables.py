"""The tables of the page: results, and where the configurations differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_gdpo.run.folder import ENDS, NOTHING, EndValue, Metrics, ends
from verl_gdpo.tools.report.runs import (
    FEWEST_FOR_BAND,
    TESTED,
    TRAINED,
    RunsOfArm,
    ends_apart,
    last_common_step,
    names,
)


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns are words, the others numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int


def results(arms: Sequence[RunsOfArm]) -> Table:
    """Each reward of each arm, at both ends of the training."""
    last = last_common_step(arms)
    of_arms = [(arm, [ends(_until(run.metrics, last)) for run in arm.runs]) for arm in arms]
    rows = [
        (name, arm.name, str(len(arm.runs)), *_cells([of_run.get(name, {}) for of_run in of_runs]))
        for name in dict.fromkeys([*names(arms, TRAINED), *names(arms, TESTED)])
        for arm, of_runs in of_arms
    ]
    caption = f"Mean reward{ends_apart(arms)}; higher is better"
    if any(len(arm.runs) >= FEWEST_FOR_BAND for arm in arms):
        caption += "; of five runs and more the median and, in brackets, the inter-quartile range"
    if len(arms) > 1 and any(len(arm.runs) == 1 for arm in arms):
        caption += "; an arm of one run may differ by chance"
    return Table(caption, ("reward", "arm", "runs", *ENDS), rows, labels=2)


def _until(metrics: Metrics, last: int) -> Metrics:
    return {step: values for step, values in metrics.items() if step <= last}


def _cells(of_runs: Sequence[Mapping[str, EndValue]]) -> list[str]:
    return [_over_runs([rewards[end] for rewards in of_runs if end in rewards]) for end in ENDS]


def _over_runs(values: Sequence[EndValue]) -> str:
    """Each of a few runs, and the quartiles of more."""
    if len(values) < FEWEST_FOR_BAND:
        return ", ".join(map(str, values)) or NOTHING
    low, median, high = np.quantile([end.value for end in values], [0.25, 0.5, 0.75])
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def differences(arms: Sequence[RunsOfArm]) -> Table | None:
    """Keys of the configuration in which the first runs of the arms differ; None without any.

    Seeds, names, folders and ports are no difference.
    """
    settings = [arm.runs[0].settings for arm in arms if arm.runs[0].config]
    keys = sorted({key for of_run in settings for key in of_run})
    values = {key: [of_run.get(key, "not there") for of_run in settings] for key in keys}
    rows = [(key, *of_key) for key, of_key in values.items() if len({*of_key}) > 1]
    header = ("key", *(arm.name for arm in arms if arm.runs[0].config))
    return Table("Where the configurations differ", header, rows, len(header)) if rows else None
