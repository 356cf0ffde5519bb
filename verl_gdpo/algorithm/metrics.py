"""The `gdpo/` metrics of a step; docs/metrics.md says how to read each of them.

`batch_metrics` is where a step enters. Below it stands what it computes, in this order: the rewards
by themselves, what they do to the advantage, which samples get one advantage, and the mean of the
batch step. Each part begins with the metrics and their names, and ends with their mathematics.

Shape suffixes: B samples, K rewards, M terms (see `Terms`), G groups, numbered from 0. Samples are
the rows that count: padding is left out, and each session has one row. A metric that a batch does
not define, such as the correlation with a constant, is None or left out.
"""

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.equation import GdpoScalars, group_index, normalize_groups
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.rubrics import Terms
from verl_gdpo.algorithm.settings import VERL_EPS, GdpoSettings
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Bools, Floats, Ints

logger = logging.getLogger(__name__)

# With more data sources, only means are told by source, because trackers draw a chart a metric.
MOST_SOURCES = 16

Metrics = dict[str, float | None]


def settings_of_advantage(adv_estimator: str, settings: GdpoSettings) -> GdpoSettings | None:
    """Return the GDPO settings that reproduce verl's estimator, or None.

    There is one difference to verl's grpo: it gives the sample of a group of one its raw score.
    """
    if adv_estimator == "gdpo":
        return settings
    if adv_estimator == "grpo":
        return verl_grpo_settings(settings)
    return None


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
    samples: Any = counted_B
    if counted_B.all():
        # Most batches have no padding, and a slice copies nothing.
        samples = slice(None)
    is_sample = counted_B.tolist()
    if sources is not None:
        sources = list(itertools.compress(sources, is_sample))
    terms = terms_of_rows(rewards.terms, samples)
    ids = list(itertools.compress(group_ids, is_sample))
    group_B = group_index(ids, len(ids), torch.device("cpu"))[0].numpy()
    has_reward_B = zero.has_a_reward(terms.present_BM, terms.weights)

    step = RewardsOfStep(
        names=list(rewards.weights),
        values_BK=rewards.values_BK[samples],
        present_BK=rewards.present_BK[samples],
        group_B=group_B,
        bounds=bounds,
        sources=sources,
    )

    metrics: Metrics = {}
    metrics |= step.statistics()
    metrics |= step.correlations()
    metrics |= _criteria_of_rubrics(step.names, terms)
    if sources is not None:
        metrics |= step.by_source()
    if settings is not None:
        if scalars is None:
            token_counts = torch.from_numpy(length_B)
            scalars = scalars_of(rewards, counted_B, group_ids, settings, token_counts)
        z_BM = scalars.z_BK.numpy()[samples]
        S_B = scalars.S_B.numpy()[samples]
        A_B = scalars.A_B.numpy()[samples]
        c_BM = contributions(z_BM, S_B, terms.values_BM, terms.weights, group_B, settings)
        metrics |= _of_advantage(step, terms, c_BM, S_B, A_B, length_B[samples])
        metrics |= _of_ties(terms, group_B)
        if settings.batch_norm != "none":
            # Step 3 counts samples that have a reward, or each of their tokens.
            count_B = has_reward_B.astype(np.int64)
            if settings.batch_norm == "token":
                count_B = has_reward_B * length_B[samples]
            metrics |= _of_batch_norm(S_B, c_BM, count_B)
    return {f"gdpo/{name}": float(value) for name, value in metrics.items() if value is not None}


def scoring_metrics(rows: BatchRows) -> dict[str, float]:
    """Return {"gdpo/scoring/<note>": mean over the samples whose scorer left this note}.

    Scorers of different tasks leave different notes.
    """
    of_samples: dict[str, list[float]] = {}
    for notes in rows.notes:
        for name, value in notes.items():
            of_samples.setdefault(name, []).append(value)
    return {f"gdpo/scoring/{name}": float(np.mean(values)) for name, values in of_samples.items()}


def rollout_metrics(rows: BatchRows, length_B: Ints) -> dict[str, float]:
    """Return what the samples of agents took; {} where no sample has used a tool.

    Args:
        length_B: the length of each row's response in tokens, with what tools wrote.
    """
    of_samples = [row for row in rows.samples if row in rows.rollouts]
    generated = np.array([rows.rollouts[row]["generated_tokens"] for row in of_samples])
    seconds = np.array([rows.rollouts[row]["tool_seconds"] for row in of_samples])
    # In a run without tools, these would tell nothing that verl's response_length does not.
    if not (seconds > 0).any() and not (generated < length_B[of_samples]).any():
        return {}
    return {
        "gdpo/rollout/generated_tokens/mean": float(generated.mean()),
        "gdpo/rollout/tool_seconds/mean": float(seconds.mean()),
        "gdpo/rollout/tool_seconds/max": float(seconds.max()),
    }


# --- the rewards by themselves --------------------------------------------------------------------


class InGroups(NamedTuple):
    """One reward, seen group by group."""

    within_B: Floats | None  # The result of `within_groups`; None if some sample lacks it.
    there_G: Bools  # Which groups have a sample with the reward.
    states: dict[str, Bools]  # {statistic: in which groups it holds}


class Sources(NamedTuple):
    """The data sources of the samples."""

    names: list[str]
    number_B: Ints  # The place of each sample's source in `names`.


@dataclass(frozen=True)
class RewardsOfStep:
    """The rewards of the samples of one step, after their conditions."""

    names: Sequence[str]
    values_BK: Floats
    present_BK: Bools
    group_B: Ints
    bounds: Mapping[str, Bounds]
    sources: Sequence[str] | None = None  # of each sample

    def statistics(self) -> Metrics:
        """Return {"<reward>/<statistic>": value} over the samples and groups that have the reward.

        `std` has ddof 0. Only `missing` is a share of all samples.
        """
        metrics: Metrics = {}
        for k, name in enumerate(self.names):
            has_B = self.present_BK[:, k]
            metrics[f"{name}/missing"] = 1 - has_B.mean()
            # Of no values, numpy's mean is NaN with a warning, and its min raises.
            if not has_B.any():
                continue
            in_groups = self._in_groups[k]
            for state, holds_G in in_groups.states.items():
                metrics[f"{name}/{state}"] = holds_G[in_groups.there_G].mean()
            present = self.values_BK[has_B, k]
            metrics[f"{name}/mean"] = present.mean()
            metrics[f"{name}/std"] = present.std()
            metrics[f"{name}/min"] = present.min()
            metrics[f"{name}/max"] = present.max()
            if name in self.bounds:
                low, high, slack = zero.with_slack(self.bounds[name])
                metrics[f"{name}/at_low"] = (present <= low + slack).mean()
                metrics[f"{name}/at_high"] = (present >= high - slack).mean()
        return metrics

    def correlations(self) -> Metrics:
        """Return the correlation within groups of each pair of rewards."""
        # Almost all rewards have no missing value. Each of them is centred once for all its pairs.
        units = {}
        for k, in_groups in enumerate(self._in_groups):
            if in_groups.within_B is not None:
                units[k] = unit(in_groups.within_B)
        metrics: Metrics = {}
        for j, k in itertools.combinations(range(len(self.names)), 2):
            if j in units and k in units:
                x_B = units[j]
                y_B = units[k]
            else:
                # The mean of a group is then over the samples that have both rewards.
                both_B = self.present_BK[:, j] & self.present_BK[:, k]
                x_B = unit(within_groups(self.values_BK[both_B, j], self.group_B[both_B]))
                y_B = unit(within_groups(self.values_BK[both_B, k], self.group_B[both_B]))
            name = f"{self.names[j]}/correlation_with_{self.names[k]}"
            metrics[name] = of_units(x_B, y_B)
        return metrics

    def updates_from_low(self, A_B: Floats) -> Metrics:
        """Return {"<reward>/update_all_low": share of the squares of A from groups all low}."""
        square_G = np.bincount(self.group_B, A_B**2)
        if not square_G.any():
            return {}
        metrics: Metrics = {}
        for name, in_groups in zip(self.names, self._in_groups, strict=True):
            is_low_G = in_groups.states.get("groups_all_low")
            if is_low_G is not None and in_groups.there_G.any():
                of_low_groups = square_G[in_groups.there_G & is_low_G]
                metrics[f"{name}/update_all_low"] = of_low_groups.sum() / square_G.sum()
        return metrics

    def by_source(self) -> Metrics:
        """Return {"<reward>/<statistic>/<source>": value} of the rewards that a source has."""
        metrics: Metrics = {}
        for k, name in enumerate(self.names):
            has_B = self.present_BK[:, k]
            source_of_present = self._sources.number_B[has_B]
            metrics |= self._means(f"{name}/mean", source_of_present, self.values_BK[has_B, k])
            in_groups = self._in_groups[k]
            for state, holds_G in in_groups.states.items():
                metrics |= self.groups_by_source(f"{name}/{state}", holds_G, in_groups.there_G)
        return metrics

    def groups_by_source(self, what: str, value_G: npt.NDArray[Any], there_G: Bools) -> Metrics:
        """Return {"<what>/<source>": mean over its groups that are there}; {} if sources are many.

        The samples of a group share a source.
        """
        if self.sources is None or len(self._sources.names) > MOST_SOURCES:
            return {}
        source_G = np.empty(len(value_G), dtype=np.int64)
        source_G[self.group_B] = self._sources.number_B
        return self._means(what, source_G[there_G], value_G[there_G])

    def _means(self, what: str, source_X: Ints, value_X: npt.NDArray[Any]) -> Metrics:
        """Return the mean value of each source that has values, of samples or of groups (X)."""
        names = self._sources.names
        count_S = np.bincount(source_X, minlength=len(names))
        total_S = np.bincount(source_X, value_X, minlength=len(names))
        metrics: Metrics = {}
        for name, total, count in zip(names, total_S, count_S, strict=True):
            if count > 0:
                metrics[f"{what}/{name}"] = total / count
        return metrics

    @cached_property
    def _sources(self) -> Sources:
        names, number_B = np.unique(np.array(self.sources, dtype=object), return_inverse=True)
        return Sources(names.tolist(), number_B)

    @cached_property
    def _in_groups(self) -> list[InGroups]:
        """Each reward, seen group by group.

        Without declared bounds, high and low are the highest and the lowest value of the step. If
        all its values are equal, nothing says which of the two they are.
        """
        order = np.argsort(self.group_B, kind="stable")
        starts_G = np.flatnonzero(np.diff(self.group_B[order], prepend=-1))
        values_BK = self.values_BK[order]
        present_BK = self.present_BK[order]
        high_GK = np.maximum.reduceat(np.where(present_BK, values_BK, -np.inf), starts_G)
        low_GK = np.minimum.reduceat(np.where(present_BK, values_BK, np.inf), starts_G)

        rewards = []
        for k, name in enumerate(self.names):
            within_B = None
            if self.present_BK[:, k].all():
                within_B = within_groups(self.values_BK[:, k], self.group_B)
            high_G = high_GK[:, k]
            low_G = low_GK[:, k]
            states = {"varies": high_G > low_G}
            lowest = low_G.min()
            highest = high_G.max()
            if name in self.bounds or lowest < highest:
                low, high, slack = zero.with_slack(self.bounds.get(name, (lowest, highest)))
                states["groups_all_high"] = low_G >= high - slack
                states["groups_all_low"] = high_G <= low + slack
            there_G = np.isfinite(high_G)
            rewards.append(InGroups(within_B, there_G, states))
        return rewards


def _criteria_of_rubrics(names: Sequence[str], terms: Terms) -> Metrics:
    """Return {"<rubric>/criteria": mean number of criteria of the samples that have some}."""
    metrics: Metrics = {}
    count_BK = fold(terms.present_BM, terms.starts_K)
    for k, name in enumerate(names):
        count_B = count_BK[:, k]
        # A reward that is no rubric is one term of its own.
        if count_B.max() > 1:
            metrics[f"{name}/criteria"] = count_B[count_B > 0].mean()
    return metrics


def within_groups(value_B: npt.NDArray[Any], group_B: Ints) -> Floats:
    """Return each value minus the mean of its group; what is only rounding becomes 0."""
    # A group may have no sample here, because samples without a reward are left out.
    size_G = np.bincount(group_B).clip(min=1)
    mean_G = np.bincount(group_B, value_B) / size_G
    return zero.centred_without_rounding(value_B - mean_G[group_B], value_B)


def correlation(x_B: npt.NDArray[Any], y_B: npt.NDArray[Any]) -> float | None:
    """Return Pearson's correlation; None if one of the two is constant."""
    return of_units(unit(x_B), unit(y_B))


def unit(values: npt.NDArray[Any]) -> Floats | None:
    """Return the values less their mean, with length 1; None if they are constant."""
    if len(values) == 0 or values.min() == values.max():
        return None
    centred = values - values.mean()
    # Of numbers below 1e-162, the squares would be 0.
    scaled = centred / np.abs(centred).max()
    result: Floats = scaled / np.linalg.norm(scaled)
    return result


def of_units(x_B: Floats | None, y_B: Floats | None) -> float | None:
    """Return the correlation of two results of `unit`."""
    if x_B is None or y_B is None:
        return None
    return float(np.clip(x_B @ y_B, -1, 1))


# --- what the rewards do to the advantage ---------------------------------------------------------


def _of_advantage(
    step: RewardsOfStep, terms: Terms, c_BM: Floats, S_B: Floats, A_B: Floats, length_B: Ints
) -> Metrics:
    A_or_0_B = zero.or_0(A_B)
    has_signal_B = zero.has_signal(S_B, c_BM)
    contributes_B = ~zero.is_0(c_BM).all(axis=1)
    signal_G = np.bincount(step.group_B, has_signal_B) > 0
    # Nothing says how to scale the contributions in a group without a signal.
    c_or_0_BM = np.where(signal_G[step.group_B, None], c_BM, 0.0)
    c_or_0_BK = fold(c_or_0_BM, terms.starts_K)

    metrics: Metrics = {}
    share_K, energy_K = shares(c_or_0_BK, S_B)
    for k, name in enumerate(step.names):
        has_B = step.present_BK[:, k]
        metrics[f"{name}/share"] = None if share_K is None else share_K[k]
        metrics[f"{name}/energy"] = None if energy_K is None else energy_K[k]
        metrics[f"{name}/correlation"] = correlation(c_or_0_BK[has_B, k], A_or_0_B[has_B])
    metrics["cancelled"] = (~has_signal_B & contributes_B).mean()
    metrics["no_signal"] = 1 - signal_G.mean()
    metrics |= step.updates_from_low(A_or_0_B)
    metrics |= step.groups_by_source("no_signal", ~signal_G, np.ones_like(signal_G))
    length_within_B = within_groups(length_B, step.group_B)
    metrics["length_correlation"] = correlation(A_or_0_B, length_within_B)
    return metrics


def contributions(
    z_BK: Floats,
    S_B: Floats,
    values_BK: Floats,
    weights_K: Floats,
    group_B: Ints,
    settings: GdpoSettings,
) -> Floats:
    """Return c_BK, what each reward adds to S. The sum over the rewards is S.

    With group_norm="per_reward", c = w z. With "summed", c = w (r - mean_g r) / (std_g R + eps),
    where R is the weighted sum of the rewards, and a missing r is 0. In a group without signal
    std_g R is about 0, and dividing by eps would make these c dominate all others. So c is not
    divided there.

    Args:
        weights_K: may be (B, K).
    """
    if settings.group_norm == "per_reward":
        return z_BK * weights_K
    size_G = np.bincount(group_B)
    total_GK = np.stack([np.bincount(group_B, value_B) for value_B in values_BK.T], axis=1)
    mean_GK = total_GK / size_G[:, None]
    c_BK = weights_K * (values_BK - mean_GK[group_B])
    if not settings.normalize_by_std:
        return c_BK
    square_G = np.bincount(group_B, c_BK.sum(axis=1) ** 2)
    std_G = np.sqrt(square_G / np.maximum(size_G - 1, 1))
    signal_G = np.bincount(group_B, ~zero.is_0(S_B)) > 0
    scale_G = np.where(signal_G, std_G + settings.eps, 1.0)
    return c_BK / scale_G[group_B, None]


def shares(c_BK: Floats, S_B: Floats) -> tuple[Floats | None, Floats | None]:
    """Return share_K and energy_K of each reward's contributions; None where nothing contributes.

    The share is cov(c, S) / var(S): the shares of all rewards add up to 1 where S is the sum of the
    contributions, and one below 0 pulls against the others. The energy is the share of the squared
    contributions, of which rewards that cancel have much.

    Args:
        c_BK: 0 in groups without a signal, as nothing says how to scale their contributions.
    """
    # Both results are ratios. Of numbers below 1e-162, the squares would be 0.
    scale = np.abs(c_BK).max()
    if scale == 0:
        scale = 1.0
    scaled_BK = c_BK / scale
    scaled_S_B = zero.or_0(S_B) / scale
    energy_K = (scaled_BK**2).sum(axis=0)
    centred_S_B = scaled_S_B - scaled_S_B.mean()
    covariance_K = scaled_BK.T @ centred_S_B
    variance = float(centred_S_B @ centred_S_B)
    share_K = None
    if variance != 0:
        share_K = covariance_K / variance
    share_of_energy_K = None
    if energy_K.any():
        share_of_energy_K = energy_K / energy_K.sum()
    return share_K, share_of_energy_K


def groups_with_signal(S_B: Floats, c_BK: Floats, group_B: Ints) -> Bools:
    """Return signal_G, True for the groups with a sample that has a signal."""
    return np.bincount(group_B, zero.has_signal(S_B, c_BK)) > 0


def fold(values_BM: Floats | Bools, starts_K: Sequence[int]) -> Floats:
    """Return the sum over the terms of each reward, (B, K); see `Terms`."""
    return np.add.reduceat(values_BM, starts_K, axis=1, dtype=np.float64)


def terms_of_rows(terms: Terms, rows: Any) -> Terms:
    """Return the terms of some rows."""
    weights = terms.weights
    if weights.ndim == 2:
        weights = weights[rows]
    return Terms(terms.values_BM[rows], terms.present_BM[rows], weights, terms.starts_K)


# --- which samples get one advantage --------------------------------------------------------------


def _of_ties(terms: Terms, group_B: Ints) -> Metrics:
    gdpo_B, grpo_B = advantages_without_eps(
        terms.values_BM, terms.present_BM, terms.weights, group_B
    )
    tied_by_gdpo, tied_by_grpo = tied_pairs(
        [gdpo_B, grpo_B], terms.values_BM, terms.present_BM, terms.weights, group_B
    )
    return {
        "tied_pairs_gdpo": tied_by_gdpo,
        "distinct_gdpo": len(np.unique(gdpo_B)),
        "tied_pairs_grpo": tied_by_grpo,
        "distinct_grpo": len(np.unique(grpo_B)),
    }


def advantages_without_eps(
    values_BK: Floats, present_BK: Bools, weights_K: Floats, group_B: Ints
) -> tuple[Floats, Floats]:
    """Return S of GDPO and of GRPO with eps=0, rounded, so that those that are the same are equal.

    eps must be 0 because it makes the rewards (0, 1) and (0, 2) different in GRPO. Without eps, a
    rounding error of the input would become an advantage, so the last digits of each reward and of
    the sum are left out. If rewards spread over 1 % of their size, advantages are then right to
    about 1e-10; they count as equal if 6 decimals agree. Step 3 only scales, so it is left out.

    Args:
        weights_K: may be (B, K).
    """
    K = values_BK.shape[1]
    # GRPO normalises the sum, which is one more column here. Each column is in one piece of memory,
    # because numpy is slow at rows of few numbers.
    sum_B = (values_BK * weights_K).sum(axis=1)
    with_sum_BK = np.vstack([values_BK.T, sum_B]).T
    there_BK = np.hstack([present_BK, np.ones_like(present_BK[:, :1])])
    rewards_BK = torch.from_numpy(zero.without_last_digits(with_sum_BK))
    precision_K = zero.precision_of(rewards_BK, rewards_BK.dtype)
    group = torch.from_numpy(group_B)
    G = int(group.max()) + 1
    z_BK, ranges = normalize_groups(rewards_BK, torch.from_numpy(there_BK), group, G, eps=0.0)

    # Only the ratio of the weights counts, and 6 decimals of small weights would be nothing.
    largest_weight = np.abs(weights_K).max()
    if largest_weight == 0:
        largest_weight = 1.0
    scaled_K = torch.from_numpy(weights_K / largest_weight)
    weight_of_sum = torch.ones(1, dtype=torch.float64)
    advantages = []
    for columns, column_weights in ((slice(K), scaled_K), (slice(K, None), weight_of_sum)):
        S_B = zero.sum_without_rounding(
            (z_BK[:, columns] * column_weights).sum(dim=1),
            column_weights,
            group,
            zero.Ranges(
                count_GK=ranges.count_GK[:, columns],
                low_GK=ranges.low_GK[:, columns],
                high_GK=ranges.high_GK[:, columns],
                scale_GK=ranges.scale_GK[:, columns],
            ),
            precision_K[columns],
        )
        advantages.append(zero.to_6_decimals(S_B.numpy()))
    of_gdpo_B, of_grpo_B = advantages
    return of_gdpo_B, of_grpo_B


def tied_pairs(
    advantages: Sequence[npt.NDArray[Any]],
    values_BK: Floats,
    present_BK: Bools,
    weights_K: Floats,
    group_B: Ints,
) -> list[float | None]:
    """Return, for each estimator, the share of the pairs with different rewards that are tied.

    Two samples differ if a reward with a weight does, or if one of them lacks it. The share is None
    if there is no such pair. The time grows with the samples and with the largest group.

    Args:
        advantages: A_B of each estimator, rounded, so that equal numbers are equal advantages.
        weights_K: may be (B, K).
    """
    # In sorted order, all pairs of a group are rows with less than the size of a group between
    # them. So a loop over that distance meets each pair once, and needs no matrix of pairs.
    order = np.argsort(group_B, kind="stable")
    sorted_group_B = group_B[order]
    sorted_advantages = [A_B[order] for A_B in advantages]
    used_BK = present_BK & (weights_K != 0)
    columns = []
    for column_B in (*(values_BK * used_BK)[order].T, *used_BK[order].T):
        # A constant column tells no two samples apart.
        if column_B.min() < column_B.max():
            columns.append(column_B)

    different = 0
    tied_of_each = [0] * len(sorted_advantages)
    largest_group = int(np.bincount(group_B).max())
    for distance in range(1, largest_group):
        differ = np.zeros(len(group_B) - distance, dtype=np.bool_)
        for column_B in columns:
            differ |= column_B[distance:] != column_B[:-distance]
        differ &= sorted_group_B[distance:] == sorted_group_B[:-distance]
        different += np.count_nonzero(differ)
        for each, A_B in enumerate(sorted_advantages):
            is_tied = A_B[distance:] == A_B[:-distance]
            tied_of_each[each] += np.count_nonzero(differ & is_tied)
    if different == 0:
        return [None] * len(sorted_advantages)
    return [tied / different for tied in tied_of_each]


# --- the mean of the batch step -------------------------------------------------------------------


def _of_batch_norm(S_B: Floats, c_BK: Floats, count_B: npt.NDArray[Any]) -> Metrics:
    reason = why_mean_is_not_0(S_B, c_BK, count_B)
    if reason is not None:
        _warn_once(reason)
    mean, std = mean_and_std(S_B, count_B)
    return {"batch_norm_mean": mean, "batch_norm_std": std}


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("verl-gdpo: gdpo/batch_norm_mean is not about 0, because %s", reason)


def why_mean_is_not_0(S_B: Floats, c_BK: Floats, count_B: npt.NDArray[Any] | None) -> str | None:
    """Return why the mean of S is not 0 in this batch; None if it is about 0.

    In every group, the z of a reward sum to 0 over the samples that have it. So the weighted sum
    has the mean 0. There are three exceptions: samples do not count equally, S is not the weighted
    sum, or float64 has too few digits.
    """
    if _is_about_0(S_B, count_B):
        return None
    if _is_about_0(S_B):
        # Counts of 0 and 1 are no tokens: they leave out the samples that have no reward.
        if count_B is not None and count_B.max() <= 1:
            return "group_norm=summed counts samples without any reward, and this step does not"
        return "batch_norm=token counts samples by their tokens, and S depends on the length"
    if _is_about_0(c_BK.sum(axis=1)):
        return "algorithm.gdpo.combine gives an S that is not 0 on average"
    return (
        "a reward is so large, compared with its spread within a group, that float64 cannot "
        "resolve it. Let the scorer subtract a typical value from it"
    )


def _is_about_0(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> bool:
    mean, std = mean_and_std(S_B, count_B)
    return zero.is_mean_0(mean, std)


def mean_and_std(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> tuple[float, float]:
    """Return the mean and the std of S (ddof 1), counting sample i `count_B[i]` times."""
    if count_B is None:
        count_B = np.ones(len(S_B))
    total = count_B.sum()
    mean = (S_B * count_B).sum() / max(total, 1)
    variance = ((S_B - mean) ** 2 * count_B).sum() / max(total - 1, 1)
    return float(mean), float(np.sqrt(variance))


# --- the ranges of the rewards, which GRPO counts by and GDPO does not ----------------------------


def small_ranges(rewards: RewardMatrix, settings: GdpoSettings) -> list[str]:
    """Return a line on each reward whose range is a tenth or less of another's.

    GRPO lets rewards count by their ranges. Where a variant of gdpo does too, nothing is said.
    """
    counts_by_range = settings.group_norm == "summed" or not settings.normalize_by_std
    if counts_by_range or settings.combine is not None:
        return []
    ranges = {}
    for name, size in rewards.ranges(settings).items():
        if rewards.weights[name] != 0:
            ranges[name] = size
    if not ranges:
        return []
    widest = max(ranges, key=ranges.__getitem__)
    lines = []
    for name, size in ranges.items():
        if 0 < size <= ranges[widest] / 10:
            lines.append(
                f"{name}: range {size:g}, a tenth or less of {widest}'s {ranges[widest]:g}. Under "
                "gdpo, with the same weight, it counts as much as the others; its range is no "
                "weight"
            )
    return lines
