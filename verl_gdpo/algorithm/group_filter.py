"""Decides which groups dynamic sampling keeps, `algorithm.filter_groups`.

Shape suffixes: B rows, K rewards, G groups.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.algorithm.settings import WHERE, GdpoSettings, hint
from verl_gdpo.algorithm.values import RewardError, value_or_error
from verl_gdpo.algorithm.variants import BATCH_WIDE
from verl_gdpo.algorithm.zero import Bools, Floats, Ints, has_signal, is_outside

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


class Groups(NamedTuple):
    """What dynamic sampling makes of some groups.

    dropped: {group: None if it is kept, else its mean metric, or weighted sum without a metric}
    outside: {reward: how many groups have a mean outside of its range} of
        `algorithm.gdpo.keep_groups`
    seen: the rewards of `keep_groups` that some sample has
    """

    dropped: Mapping[str, float | None]
    outside: Mapping[str, int]
    seen: set[str]


def classify_groups(
    rows: BatchRows, group_ids: Sequence[str], settings: GdpoSettings, metric_B: Floats | None
) -> Groups:
    """Return which groups are kept.

    A group is kept if S, the sum before the batch step, is not 0 for some sample. The sums of raw
    rewards do not decide this: they can be equal although S is not 0, and different although S is
    0. dara and sa_mrpo need statistics of the whole batch, which is not complete yet. With them, a
    group gives a gradient if w z is not 0 for some sample and reward. A group that is only padding
    is not kept.

    With `settings.keep_groups`, the mean of each reward that is named there has to be in its range
    too. Samples without the reward count nowhere, and a group in which none has it is kept.

    Args:
        metric_B: what must vary as well, if a sample of the group has it; NaN where it is missing.
    """
    # Dropped samples are padding, so that the groups of one look may have none left.
    if not rows.samples:
        none_outside = dict.fromkeys(settings.keep_groups or {}, 0)
        return Groups(dict.fromkeys(group_ids, 0.0), none_outside, set())
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

    outside: dict[str, int] = {}
    seen = set()
    for name, limits in (settings.keep_groups or {}).items():
        value_B = _raw_values(rewards, name, len(rows))
        if not np.isnan(value_B).all():
            seen.add(name)
        mean_of_reward_G = _mean_or(value_B, group_B, np.full(len(number_of), np.nan))
        outside_G = is_outside(mean_of_reward_G, *limits)
        kept_G &= ~outside_G
        outside[name] = int(outside_G.sum())

    dropped: dict[str, float | None] = {}
    for group, number in number_of.items():
        # rounded, because verl reports each distinct number in a line of its own
        dropped[group] = None if kept_G[number] else round(float(mean_G[number]), 6)
    return Groups(dropped, outside, seen)


def _raw_values(rewards: RewardMatrix, name: str, B: int) -> Floats:
    """Return a reward of each row before its condition, NaN where it is missing or not counted."""
    raw = rewards.raw
    assert raw is not None  # it was made of rows
    value_B = np.full(B, np.nan)
    if name in raw.values:
        value_B[raw.samples] = raw.values[name]
    return value_B


@dataclass
class FilterCounts:
    """Counts what dynamic sampling made of the groups since the last batch."""

    groups: int = 0
    kept: int = 0
    outside: Counter[str] = field(default_factory=Counter)
    # The rewards of `algorithm.gdpo.keep_groups` that some sample of the run had.
    seen: set[str] = field(default_factory=set)

    def add(self, groups: Groups) -> None:
        """Count new groups."""
        self.groups += len(groups.dropped)
        for value in groups.dropped.values():
            if value is None:
                self.kept += 1
        # Also 0, so that the metric is there in each step.
        for name, count in groups.outside.items():
            self.outside[name] += count
        self.seen |= groups.seen

    def check_seen(self, settings: GdpoSettings, rows: BatchRows) -> None:
        """Raise RewardError if no sample until the first batch, `rows`, has a reward to keep by."""
        for name in settings.keep_groups or {}:
            if name not in self.seen:
                names = list(rows.columns)
                raise RewardError(
                    f"{WHERE}.keep_groups.{name}: no sample had a value of it, so all groups were "
                    f"kept; the scorer returned {names}{hint(name, names)}"
                )

    def metrics(self) -> dict[str, float]:
        """Return the shares of the groups that were looked at, and begin to count again."""
        metrics = {}
        if self.groups > 0:
            metrics["gdpo/filter_kept"] = self.kept / self.groups
            for name, count in self.outside.items():
                metrics[f"gdpo/{name}/groups_outside"] = count / self.groups
        self.groups = 0
        self.kept = 0
        self.outside.clear()
        return metrics


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
