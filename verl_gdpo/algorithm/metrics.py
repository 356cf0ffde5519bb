"""The `gdpo/` metrics of a step; docs/metrics.md says how to read each of them.

Shape suffixes: B samples, K rewards, G groups. Samples are the rows that count: padding is left
out, and each session has one row. A metric that a batch does not define, such as the correlation
with a constant, is None or left out.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm import statistics, zero
from verl_gdpo.algorithm.equation import GdpoScalars, group_index
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.rubrics import Terms
from verl_gdpo.algorithm.settings import VERL_EPS, GdpoSettings
from verl_gdpo.algorithm.statistics import unit, within_groups
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Bools, Floats, Ints, with_slack

logger = logging.getLogger(__name__)

STATISTICS = ("mean", "std", "min", "max")  # of numpy
MOST_SOURCES = 16  # with more, only means are told by data source

Metrics = dict[str, float | None]


def settings_of_advantage(adv_estimator: str, settings: GdpoSettings) -> GdpoSettings | None:
    """Return the GDPO settings that reproduce verl's estimator, or None.

    There is one difference to verl's grpo: it gives the sample of a group of one its raw score.
    """
    if adv_estimator == "gdpo":
        return settings
    return verl_grpo_settings(settings) if adv_estimator == "grpo" else None


def verl_grpo_settings(settings: GdpoSettings) -> GdpoSettings:
    """Return settings that reproduce verl's grpo with the same rewards, weights and conditions."""
    return replace(settings, group_norm="summed", batch_norm="none", eps=VERL_EPS, combine=None)


def batch_metrics(
    rewards: RewardMatrix,
    counted_B: Bools,
    group_ids: Any,
    length_B: Ints,
    settings: GdpoSettings | None,
    bounds: Mapping[str, Bounds],
    sources: Sequence[str] | None = None,
    scalars: GdpoScalars | None = None,
) -> dict[str, float]:
    """Return all metrics of one step as {"gdpo/...": finite number}.

    Logs a warning, once for each reason, if the mean that step 3 subtracts is not about 0.

    Args:
        rewards: the rewards of all rows, after their conditions.
        counted_B: True for the rows that are samples.
        group_ids: one id per row; samples of one prompt share an id.
        length_B: response tokens of each row's session; with batch_norm="token", only the trained
            ones.
        settings: the result of `settings_of_advantage`; with None, only the statistics of the
            rewards are computed.
        bounds: {reward: (low, high)} of the rewards with declared bounds.
        sources: the data source of each row, if rewards are also told by data source.
        scalars: the estimator's result for all rows; with None, it is computed.
    """
    ids = [*compress(group_ids, counted_B.tolist())]
    group_B = group_index(ids, len(ids), torch.device("cpu"))[0].numpy()
    rows_B = slice(None) if counted_B.all() else counted_B  # a slice copies nothing
    values_BK, present_BK = rewards.values_BK[rows_B], rewards.present_BK[rows_B]
    sources = None if sources is None else [*compress(sources, counted_B.tolist())]
    step = RewardsOfStep([*rewards.weights], values_BK, present_BK, group_B, bounds, sources)
    terms = statistics.terms_of_rows(rewards.terms, rows_B)
    metrics = step.statistics() | step.correlations()
    counts = zip(step.names, statistics.fold(terms.present_BM, terms.starts_K).T, strict=True)
    metrics |= {f"{name}/criteria": of[of > 0].mean() for name, of in counts if of.max() > 1}
    if sources is not None:
        metrics |= step.by_source()
    if settings is not None:
        if scalars is None:
            tokens_B = torch.from_numpy(length_B)
            scalars = scalars_of(rewards, counted_B, group_ids, settings, tokens_B)
        z_BM, S_B, A_B = (scalar.numpy()[rows_B] for scalar in scalars)
        c_BM = statistics.contributions(
            z_BM, S_B, terms.values_BM, terms.weights, group_B, settings
        )
        metrics |= _of_advantage(step, terms, c_BM, S_B, A_B, length_B[rows_B])
        metrics |= _of_ties(terms, group_B)
        if settings.batch_norm != "none":
            times_B = length_B[rows_B] if settings.batch_norm == "token" else 1
            count_B = zero.has_a_reward(terms.present_BM, terms.weights) * times_B
            metrics |= _of_batch_norm(S_B, c_BM, count_B)
    return {f"gdpo/{name}": float(value) for name, value in metrics.items() if value is not None}


def scoring_metrics(rows: BatchRows) -> dict[str, float]:
    """Return {"gdpo/scoring/<note>": mean over the samples whose scorer left notes}."""
    names = rows.notes[0] if rows.notes else ()
    return {f"gdpo/scoring/{name}": float(np.mean([n[name] for n in rows.notes])) for name in names}


def _of_advantage(
    step: "RewardsOfStep", terms: Terms, c_BM: Floats, S_B: Floats, A_B: Floats, length_B: Ints
) -> Metrics:
    A_B = zero.or_0(A_B)
    signal_B = zero.has_signal(S_B, c_BM)
    signal_G = np.bincount(step.group_B, signal_B) > 0
    c_or_0_BM = np.where(signal_G[step.group_B, None], c_BM, 0.0)
    c_or_0_BK = statistics.fold(c_or_0_BM, terms.starts_K)
    share_K, energy_K = statistics.shares(c_or_0_BK, S_B)
    metrics: Metrics = {}
    for k, name in enumerate(step.names):
        metrics[f"{name}/share"] = None if share_K is None else share_K[k]
        metrics[f"{name}/energy"] = None if energy_K is None else energy_K[k]
        has_B = step.present_BK[:, k]
        correlation = statistics.correlation(c_or_0_BK[has_B, k], A_B[has_B])
        metrics[f"{name}/correlation"] = correlation
    metrics["cancelled"] = (~signal_B & ~zero.is_0(c_BM).all(axis=1)).mean()
    metrics["no_signal"] = 1 - signal_G.mean()
    metrics |= step.updates_from_low(A_B)
    metrics |= step.groups_by_source("no_signal", ~signal_G, np.ones_like(signal_G))
    length_of_B = within_groups(length_B, step.group_B)
    metrics["length_correlation"] = statistics.correlation(A_B, length_of_B)
    return metrics


def _of_ties(terms: Terms, group_B: Ints) -> Metrics:
    of_rewards = *terms[:3], group_B
    exact = statistics.advantages_without_eps(*of_rewards)
    tied = statistics.tied_pairs(exact, *of_rewards)
    metrics: Metrics = {}
    for method, A_B, share in zip(("gdpo", "grpo"), exact, tied, strict=True):
        metrics |= {f"tied_pairs_{method}": share, f"distinct_{method}": len(np.unique(A_B))}
    return metrics


def _of_batch_norm(S_B: Floats, c_BK: Floats, count_B: npt.NDArray[Any]) -> Metrics:
    if (reason := statistics.why_mean_is_not_0(S_B, c_BK, count_B)) is not None:
        _warn_once(reason)
    mean, std = statistics.mean_and_std(S_B, count_B)
    return {"batch_norm_mean": mean, "batch_norm_std": std}


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("verl-gdpo: gdpo/batch_norm_mean is not about 0, because %s", reason)


@dataclass(frozen=True)
class RewardsOfStep:
    """The rewards of the samples of one step, after their conditions."""

    names: Sequence[str]
    values_BK: Floats
    present_BK: Bools
    group_B: Ints  # numbered from 0
    bounds: Mapping[str, Bounds]
    sources: Sequence[str] | None = None  # of each sample

    def statistics(self) -> Metrics:
        """Return {"<reward>/<statistic>": value} over the samples and groups that have the reward.

        `std` has ddof 0. Only `missing` is a share of all samples.
        """
        metrics: Metrics = {}
        for k, name in enumerate(self.names):
            present = self.values_BK[self.present_BK[:, k], k]
            of_reward: Metrics = {"missing": 1 - self.present_BK[:, k].mean()}
            if len(present):
                there_G, states = self._of_groups[k]
                of_reward |= {what: is_so_G[there_G].mean() for what, is_so_G in states.items()}
                of_reward |= {what: getattr(present, what)() for what in STATISTICS}
            if len(present) and name in self.bounds:
                low, high, slack = with_slack(self.bounds[name])
                of_reward["at_low"] = (present <= low + slack).mean()
                of_reward["at_high"] = (present >= high - slack).mean()
            metrics |= {f"{name}/{what}": value for what, value in of_reward.items()}
        return metrics

    def correlations(self) -> Metrics:
        """Return the correlation within groups of each pair of rewards."""
        complete = np.flatnonzero(self.present_BK.all(axis=0)).tolist()
        units = {k: unit(within_groups(self.values_BK[:, k], self.group_B)) for k in complete}
        metrics: Metrics = {}
        for pair in combinations(range(len(self.names)), 2):
            if units.keys() >= {*pair}:
                x_B, y_B = (units[k] for k in pair)
            else:  # a group's mean is over the samples that have both
                both_B = self.present_BK[:, pair].all(axis=1)
                values_BK, group_B = self.values_BK[both_B], self.group_B[both_B]
                x_B, y_B = (unit(within_groups(values_BK[:, k], group_B)) for k in pair)
            name, other = (self.names[k] for k in pair)
            metrics[f"{name}/correlation_with_{other}"] = statistics.of_units(x_B, y_B)
        return metrics

    def updates_from_low(self, A_B: Floats) -> Metrics:
        """Return {"<reward>/update_all_low": share of the squares of A from groups all low}."""
        square_G = np.bincount(self.group_B, A_B**2)
        if not square_G.any():
            return {}
        return {
            f"{name}/update_all_low": square_G[there_G & low_G].sum() / square_G.sum()
            for name, (there_G, states) in zip(self.names, self._of_groups, strict=True)
            if there_G.any() and (low_G := states.get("groups_all_low")) is not None
        }

    def by_source(self) -> Metrics:
        """Return {"<reward>/<statistic>/<source>": value} of the rewards that a source has."""
        metrics: Metrics = {}
        for k, (there_G, states) in enumerate(self._of_groups):
            name, has_B = self.names[k], self.present_BK[:, k]
            value_B = self.values_BK[has_B, k]
            metrics |= self._means(f"{name}/mean", self._sources[1][has_B], value_B)
            for what, is_so_G in states.items():
                metrics |= self.groups_by_source(f"{name}/{what}", is_so_G, there_G)
        return metrics

    def groups_by_source(self, what: str, value_G: npt.NDArray[Any], there_G: Bools) -> Metrics:
        """Return {"<what>/<source>": mean over its groups that are there}; {} if sources are many.

        The samples of a group share a source.
        """
        if self.sources is None or len(self._sources[0]) > MOST_SOURCES:
            return {}
        source_G = np.empty(len(value_G), dtype=np.int64)
        source_G[self.group_B] = self._sources[1]
        return self._means(what, source_G[there_G], value_G[there_G])

    def _means(self, what: str, source_X: Ints, value_X: npt.NDArray[Any]) -> Metrics:
        names = self._sources[0]
        count_S = np.bincount(source_X, minlength=len(names))
        total_S = np.bincount(source_X, value_X, minlength=len(names))
        means = zip(names, total_S, count_S, strict=True)
        return {f"{what}/{name}": total / count for name, total, count in means if count}

    @cached_property
    def _sources(self) -> tuple[list[str], Ints]:
        """The names of the data sources, and the number of each sample's."""
        names, source_B = np.unique(np.array(self.sources, dtype=object), return_inverse=True)
        return names.tolist(), source_B

    @cached_property
    def _of_groups(self) -> list[tuple[Bools, dict[str, Bools]]]:
        """Of each reward, which groups have it, and {statistic: in which groups it holds}.

        Without declared bounds, high and low are the highest and the lowest value of the step. If
        all its values are equal, nothing says which of the two they are.
        """
        order = np.argsort(self.group_B, kind="stable")
        starts = np.flatnonzero(np.diff(self.group_B[order], prepend=-1))
        values_BK, present_BK = self.values_BK[order], self.present_BK[order]
        high_GK = np.maximum.reduceat(np.where(present_BK, values_BK, -np.inf), starts)
        low_GK = np.minimum.reduceat(np.where(present_BK, values_BK, np.inf), starts)
        of_groups = []
        for name, high_G, low_G in zip(self.names, high_GK.T, low_GK.T, strict=True):
            there_G = np.isfinite(high_G)
            states = {"varies": high_G > low_G}
            extremes = low_G.min(), high_G.max()
            if name in self.bounds or extremes[0] < extremes[1]:
                low, high, slack = with_slack(self.bounds.get(name, extremes))
                states["groups_all_high"] = low_G >= high - slack
                states["groups_all_low"] = high_G <= low + slack
            of_groups.append((there_G, states))
        return of_groups
