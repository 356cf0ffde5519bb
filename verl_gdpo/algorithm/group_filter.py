"""Decides which groups dynamic sampling keeps, `algorithm.filter_groups`.

Shape suffixes: B rows, K rewards, G groups.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RewardError, value_or_error
from verl_gdpo.algorithm.variants import BATCH_WIDE
from verl_gdpo.algorithm.zero import Bools, Floats, Ints, has_signal

logger = logging.getLogger(__name__)

# the metrics that mean the summed score, which verl or its recipes call by these names
SUM_METRICS = ("reward", "score", "seq_reward", "seq_final_reward")


@dataclass
class FilterMetric:
    """The value of a sample that must vary within a group, besides GDPO's own signal.

    name: its name among the values that the scorer returns; None if no value has to vary.
    """

    name: str | None
    is_known: bool = False  # whether any sample had a value
    has_warned: bool = False  # that a sample had no value
    samples: int = 0  # since the last batch
    missing: int = 0  # of these, without a value

    def read(self, rows: BatchRows) -> Floats | None:
        """Return the value of each row, NaN where it has none; None if no value has to vary.

        Raises:
            RewardError: a value is not a finite number.
        """
        if self.name is None:
            return None
        value_B = np.full(len(rows), np.nan)
        column = rows.columns.get(self.name, [None] * len(rows))
        for row in rows.samples:
            value = self._number(column[row], rows.label(row))
            self.samples += 1
            if value is None:
                self.missing += 1
                self._warn_once(rows.label(row))
            else:
                self.is_known = True
                value_B[row] = value
        return value_B

    def _number(self, value: Any, label: str) -> float | None:
        """Return the value of a row, None if it has none; raise RewardError for no number."""
        if value is ABSENT:
            return None
        try:
            return value_or_error(value)
        except ValueError as error:
            raise RewardError(f"{label}: {self._key} {error}") from None

    def _warn_once(self, label: str) -> None:
        if self.has_warned:
            return
        self.has_warned = True
        logger.warning(
            "verl-gdpo: %s: %s has no value of it. Such samples are left out, and a group "
            "without any value is kept if GDPO has a signal in it",
            self._key,
            label,
        )

    def check_known(self, rows: BatchRows) -> None:
        """Raise RewardError if no sample until the first batch, `rows`, has a value of it."""
        if self.name is None or self.is_known:
            return
        always = ", this one always None" if self.name in rows.columns else ""
        raise RewardError(
            f"{self._key}: the scorer returned {list(rows.columns)}{always}. Name one with "
            "values, or set algorithm.filter_groups.metric=reward for GDPO's own signal alone"
        )

    def metrics(self) -> dict[str, float]:
        """Return the share of the samples without a value, and begin to count again."""
        metrics = {}
        if self.samples > 0:
            metrics["gdpo/filter_metric_missing"] = self.missing / self.samples
        self.samples = 0
        self.missing = 0
        return metrics

    @property
    def _key(self) -> str:
        return f"algorithm.filter_groups.metric={self.name}"


def classify_groups(
    rows: BatchRows, group_ids: Sequence[str], settings: GdpoSettings, metric_B: Floats | None
) -> dict[str, float | None]:
    """Return {group: None if it is kept, else its mean metric, or weighted sum without a metric}.

    A group is kept if S, the sum before the batch step, is not 0 for some sample. The sums of raw
    rewards do not decide this: they can be equal although S is not 0, and different although S is
    0. dara and sa_mrpo need statistics of the whole batch, which is not complete yet. With them, a
    group gives a gradient if w z is not 0 for some sample and reward. A group that is only padding
    is not kept.

    Args:
        metric_B: what must vary as well, if a sample of the group has it; NaN where it is missing.
    """
    rewards = RewardMatrix.of(rows, settings)
    number_of: dict[str, int] = {}  # {group: its number}
    for group in group_ids:
        number_of.setdefault(group, len(number_of))
    group_B = np.array([number_of[group] for group in group_ids])

    signal_B = _has_signal(rewards, rows, group_B, settings)
    # Signal and rewards of rows that do not count are 0.
    kept_G = np.bincount(group_B, signal_B) > 0
    weights_K = np.array(list(rewards.weights.values()))
    sum_G = np.bincount(group_B, rewards.values_BK @ weights_K)
    mean_G = sum_G / np.bincount(group_B, rows.counted_B).clip(min=1)
    if metric_B is not None:
        kept_G &= _varies(metric_B, group_B, len(number_of))
        mean_G = _mean_or(metric_B, group_B, mean_G)

    result: dict[str, float | None] = {}
    for group, number in number_of.items():
        # rounded, because verl reports each distinct number in a line of its own
        result[group] = None if kept_G[number] else round(float(mean_G[number]), 6)
    return result


def _has_signal(
    rewards: RewardMatrix, rows: BatchRows, group_B: Ints, settings: GdpoSettings
) -> Bools:
    """Return whether a sample has a gradient before the batch step."""
    if settings.combine is not None and settings.combine.name in BATCH_WIDE:
        contribution_BM = _contributions(rewards, rows, group_B, replace(settings, combine=None))[0]
        is_not_0_B: Bools = (contribution_BM != 0).any(axis=1)
        return is_not_0_B
    contribution_BM, S_B = _contributions(rewards, rows, group_B, settings)
    return has_signal(S_B, contribution_BM)


def _contributions(
    rewards: RewardMatrix, rows: BatchRows, group_B: Ints, settings: GdpoSettings
) -> tuple[Floats, Floats]:
    """Return w z of each term, (B, M), and S."""
    scalars = scalars_of(rewards, rows.counted_B, group_B, replace(settings, batch_norm="none"))
    z_BM = scalars.z_BK.numpy()
    if settings.group_norm == "per_reward":
        return z_BM * rewards.terms.weights, scalars.S_B.numpy()
    # The summed rewards, which have their weights already, are normalised as one.
    return z_BM, scalars.S_B.numpy()


def _varies(metric_B: Floats, group_B: Ints, G: int) -> Bools:
    """Return whether the metric differs within each group, (G,); True where no sample has one."""
    low_G = np.full(G, np.nan)
    high_G = np.full(G, np.nan)
    # `fmin` and `fmax` take the number of a number and NaN.
    np.fmin.at(low_G, group_B, metric_B)
    np.fmax.at(high_G, group_B, metric_B)
    varies_G: Bools = np.isnan(low_G) | (low_G < high_G)
    return varies_G


def _mean_or(metric_B: Floats, group_B: Ints, else_G: Floats) -> Floats:
    """Return the mean of the metric in each group, (G,); `else_G` where no sample has one."""
    count_G = np.bincount(group_B, ~np.isnan(metric_B))
    sum_G = np.bincount(group_B, np.nan_to_num(metric_B))
    return np.where(count_G > 0, sum_G / count_G.clip(min=1), else_G)
