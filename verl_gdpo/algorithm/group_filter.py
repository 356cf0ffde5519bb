"""Decides which groups dynamic sampling keeps, `algorithm.filter_groups`.

Shape suffixes: B rows, K rewards, G groups.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RewardError, value_or_error
from verl_gdpo.algorithm.variants import BATCH_WIDE
from verl_gdpo.algorithm.zero import Floats, has_signal

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
        for row in np.flatnonzero(rows.counted_B).tolist():
            try:
                number = None if column[row] is ABSENT else value_or_error(column[row])
            except ValueError as error:
                raise RewardError(f"{rows.label(row)}: {self._key} {error}") from None
            self.is_known |= number is not None
            self.samples += 1
            self.missing += number is None
            value_B[row] = np.nan if number is None else number
            if number is None and not self.has_warned:
                self.has_warned = True
                logger.warning(
                    "verl-gdpo: %s: %s has no value of it. Such samples are left out, and a group "
                    "without any value is kept if GDPO has a signal in it",
                    self._key,
                    rows.label(row),
                )
        return value_B

    def check_known(self, rows: BatchRows) -> None:
        """Raise RewardError if no sample until the first batch, `rows`, has a value of it."""
        if self.name is not None and not self.is_known:
            always = ", this one always None" if self.name in rows.columns else ""
            raise RewardError(
                f"{self._key}: the scorer returned {[*rows.columns]}{always}. Name one with "
                "values, or set algorithm.filter_groups.metric=reward for GDPO's own signal alone"
            )

    def metrics(self) -> dict[str, float]:
        """Return the share of the samples without a value, and begin to count again."""
        samples, missing, self.samples, self.missing = self.samples, self.missing, 0, 0
        return {"gdpo/filter_metric_missing": missing / samples} if samples else {}

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
    number_of = {group: number for number, group in enumerate(dict.fromkeys(group_ids))}
    group_B = np.array([number_of[group] for group in group_ids])
    weights_K = np.array([*rewards.weights.values()])
    batch_wide = settings.combine is not None and settings.combine.name in BATCH_WIDE
    combine = None if batch_wide else settings.combine
    settings = replace(settings, batch_norm="none", combine=combine)
    z_BM, S_B, _ = scalars_of(rewards, rows.counted_B, group_B, settings)
    contribution_BM = z_BM.numpy()
    if settings.group_norm == "per_reward":
        contribution_BM = contribution_BM * rewards.terms.weights
    signal_B = has_signal(S_B.numpy(), contribution_BM)
    if batch_wide:
        signal_B = (contribution_BM != 0).any(axis=1)
    # rewards and signal of padding are 0
    count_G = np.bincount(group_B, rows.counted_B)
    mean_G = np.bincount(group_B, rewards.values_BK @ weights_K) / count_G.clip(min=1)
    kept_G = np.bincount(group_B, signal_B) > 0
    if metric_B is not None:
        low_G, high_G = np.full((2, len(number_of)), np.nan)
        np.fmin.at(low_G, group_B, metric_B)
        np.fmax.at(high_G, group_B, metric_B)
        kept_G &= np.isnan(low_G) | (low_G < high_G)
        count_G = np.bincount(group_B, ~np.isnan(metric_B))
        sum_G = np.bincount(group_B, np.nan_to_num(metric_B))
        mean_G = np.where(count_G > 0, sum_G / count_G.clip(min=1), mean_G)
    return {
        # rounded, because verl reports each distinct number in a line of its own
        group: None if kept_G[number] else round(float(mean_G[number]), 6)
        for group, number in number_of.items()
    }
