"""What one step shows: sums over its samples, from which the advice follows.

GRPO and GDPO are those of the paper, with the run's rewards, weights and conditions, and GDPO
without its step over the batch, which only scales. Shape suffixes: B samples, K rewards, G groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_gdpo.advantage.zero import or_0
from verl_gdpo.batch.advantages import (
    Bools,
    Floats,
    Ints,
    contributions,
    covariances,
    groups_with_signal,
    scalars_of,
    within_groups,
)
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import verl_grpo_settings
from verl_gdpo.batch.ties import advantages_without_eps
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.tools.advice.pairs import Pairs, count_pairs

GDPO = GdpoSettings(batch_norm="none")
GRPO = verl_grpo_settings(GdpoSettings())


@dataclass(frozen=True)
class Sums:
    """Sums over the samples of a step. Steps are added up by `Evidence`."""

    within_K: Floats  # squares of the rewards less the mean of their group
    within_freedom_K: Floats
    between_K: Floats  # squares of the groups' means less the mean of the step
    between_freedom_K: Floats
    product_KK: Floats  # products of two rewards within groups, over samples that have both
    square_KK: Floats  # squares of the first reward, over the same samples
    log_ratio_KK: Floats  # squares of log(std of one / std of the other) less its mean in the step
    log_ratio_freedom_KK: Floats
    have_KK: Floats  # samples that have both rewards
    met_KK: Floats  # of these, those in which the first is not at its lowest
    met_both_KK: Floats  # those in which neither is
    grpo_K: Floats  # covariance of contribution and S
    gdpo_K: Floats
    grpo: Floats  # variance of S
    gdpo: Floats
    grpo_and_gdpo: Floats  # covariance of the two S
    rescaled: Floats  # the same of GRPO on rewards of equal spread
    rescaled_and_gdpo: Floats


@dataclass(frozen=True)
class StepEvidence:
    """What one step shows."""

    names: Sequence[str]
    weights_K: Floats
    mean_K: Floats  # NaN if no sample has the reward, as are the next two
    low_K: Floats
    high_K: Floats
    sums: Sums
    pairs: Pairs


def look(rewards: RewardMatrix, counted_B: Bools, group_ids: Any) -> StepEvidence:
    """Return what the rewards of one step show.

    Args:
        rewards: of all rows, after their conditions.
        counted_B: True for the rows that are samples.
        group_ids: one id per row; samples of one prompt share an id.
    """
    values_BK, present_BK = rewards.values_BK[counted_B], rewards.present_BK[counted_B]
    group_B = np.unique(np.asarray(group_ids)[counted_B], return_inverse=True)[1]
    weights_K = np.array(list(rewards.weights.values()))
    masked_BK = np.where(present_BK, values_BK, np.nan)
    low_K, high_K = np.fmin.reduce(masked_BK), np.fmax.reduce(masked_BK)
    sums = _within(values_BK, present_BK, group_B)
    spread_K = np.sqrt(sums["within_K"] / sums["within_freedom_K"].clip(min=1))
    sums |= _ratios(_std_of_groups(values_BK, present_BK, group_B))
    sums |= _met(values_BK, present_BK, low_K)
    sums |= _estimators(rewards.weights, values_BK, present_BK, spread_K, group_B)
    gdpo_B, grpo_B = advantages_without_eps(values_BK, present_BK, weights_K, group_B)
    used_BK = present_BK & (weights_K != 0)
    return StepEvidence(
        list(rewards.weights),
        weights_K,
        _mean_of(values_BK, present_BK),
        low_K,
        high_K,
        Sums(**sums),
        count_pairs(values_BK * weights_K, used_BK, grpo_B, gdpo_B, group_B),
    )


def _mean_of(values_BK: Floats, present_BK: Bools) -> Floats:
    count_K = present_BK.sum(axis=0)
    total_K = np.where(count_K > 0, values_BK.sum(axis=0, where=present_BK), np.nan)
    mean_K: Floats = total_K / count_K.clip(min=1)
    return mean_K


def _std_of_groups(values_BK: Floats, present_BK: Bools, group_B: Ints) -> Floats:
    """Return the std of each reward in each group (ddof 1), 0 with fewer than two values."""
    columns = []
    for value_B, there_B in zip(values_BK.T, present_BK.T, strict=True):
        group, size = group_B[there_B], np.bincount(group_B[there_B], minlength=group_B.max() + 1)
        centred = within_groups(value_B[there_B], group)
        square_G = np.bincount(group, centred**2, minlength=len(size))
        columns.append(np.sqrt(square_G / np.maximum(size - 1, 1)))
    return np.stack(columns, axis=1)


def _within(values_BK: Floats, present_BK: Bools, group_B: Ints) -> dict[str, Floats]:
    K = values_BK.shape[1]
    of_one = {name: np.zeros(K) for name in ("within", "between")}
    freedom = {name: np.zeros(K) for name in ("within", "between")}
    product_KK, square_KK = np.zeros((K, K)), np.zeros((K, K))
    for j in range(K):
        for k in range(j, K):
            both_B = present_BK[:, j] & present_BK[:, k]
            if not both_B.any():
                continue
            x_B, y_B = (within_groups(values_BK[both_B, n], group_B[both_B]) for n in (j, k))
            product_KK[j, k] = product_KK[k, j] = x_B @ y_B
            square_KK[j, k], square_KK[k, j] = x_B @ x_B, y_B @ y_B
            if j == k:
                groups = len(np.unique(group_B[both_B]))
                values = values_BK[both_B, k]
                of_one["within"][k] = x_B @ x_B
                of_one["between"][k] = ((values - values.mean()) ** 2).sum() - x_B @ x_B
                freedom["within"][k], freedom["between"][k] = len(x_B) - groups, groups - 1
    return {
        **{f"{name}_K": of_one[name] for name in of_one},
        **{f"{name}_freedom_K": freedom[name] for name in of_one},
        "product_KK": product_KK,
        "square_KK": square_KK,
    }


def _ratios(std_GK: Floats) -> dict[str, Floats]:
    K = std_GK.shape[1]
    square_KK, freedom_KK = np.zeros((K, K)), np.zeros((K, K))
    for j in range(K):
        for k in range(K):
            both_G = (std_GK[:, j] > 0) & (std_GK[:, k] > 0)
            if j != k and both_G.sum() > 1:
                ratio = np.log(std_GK[both_G, j] / std_GK[both_G, k])
                square_KK[j, k] = ((ratio - ratio.mean()) ** 2).sum()
                freedom_KK[j, k] = len(ratio) - 1
    return {"log_ratio_KK": square_KK, "log_ratio_freedom_KK": freedom_KK}


def _met(values_BK: Floats, present_BK: Bools, low_K: Floats) -> dict[str, Floats]:
    have_BK = present_BK.astype(float)
    met_BK = (present_BK & (values_BK > low_K)).astype(float)
    return {
        "have_KK": have_BK.T @ have_BK,
        "met_KK": met_BK.T @ have_BK,
        "met_both_KK": met_BK.T @ met_BK,
    }


def _estimators(
    weights: Mapping[str, float],
    values_BK: Floats,
    present_BK: Bools,
    spread_K: Floats,
    group_B: Ints,
) -> dict[str, Floats]:
    rescaled_BK = values_BK / np.where(spread_K > 0, spread_K, 1.0)
    weights_K, found, S = np.array([*weights.values()]), {}, {}
    for method, settings, x_BK in (
        ("grpo", GRPO, values_BK),
        ("gdpo", GDPO, values_BK),
        ("rescaled", GRPO, rescaled_BK),
    ):
        matrix = RewardMatrix(weights, x_BK, present_BK)
        scalars = scalars_of(matrix, np.ones(len(x_BK), np.bool_), group_B, settings)
        z_BK, S_B = scalars.z_BK.numpy(), scalars.S_B.numpy()
        c_BK = contributions(z_BK, S_B, x_BK, weights_K, group_B, settings)
        c_BK = np.where(groups_with_signal(S_B, c_BK, group_B)[group_B, None], c_BK, 0.0)
        found[f"{method}_K"], variance = covariances(c_BK, or_0(S_B))
        found[method], S[method] = np.array(variance), S_B
    del found["rescaled_K"]  # the same as that of GDPO, but for what the correlation says
    for method in ("grpo", "rescaled"):
        found[f"{method}_and_gdpo"] = np.array(S[method] @ S["gdpo"])
    return found
