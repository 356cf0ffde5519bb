"""The `gdpo/` metrics of a step; docs/metrics.md says how to read each of them.

Shape suffixes: B samples, K rewards, G groups. Samples are the rows that count: padding is left
out, and each session has one row. A metric that a batch does not define, such as the correlation
with a constant, is None or left out.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.advantage.equation import GroupNorm, compute_gdpo_scalars
from verl_gdpo.advantage.variants import BOUNDS_TOLERANCE, Bounds
from verl_gdpo.batch.advantages import scalars_of
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.ties import kinds, tied_pairs
from verl_gdpo.settings.algorithm import GdpoSettings

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Statistics = dict[str, float | None]

METHODS: dict[str, GroupNorm] = {"gdpo": "per_reward", "grpo": "summed"}

# S or an advantage counts as 0 below this. group_norm.py removes float64 rounding; this removes the
# rounding of rewards that a scorer computed in float32
NO_SIGNAL = 1e-8
# S also counts as 0 below this share of the summed absolute contributions: when rewards cancel, eps
# leaves a residue of about eps / std
CANCELLED = 1e-3
CENTRED_ROUNDING = 1e-9  # of the largest value
# a mean of S above this number of standard deviations is not a rounding error
MEAN_TOLERANCE = 1e-6


def settings_of_advantage(adv_estimator: str, settings: GdpoSettings) -> GdpoSettings | None:
    """Return the GDPO settings that reproduce verl's estimator, or None.

    There is one difference to verl's grpo: it gives the sample of a group of one its raw score.
    """
    if adv_estimator == "gdpo":
        return settings
    return verl_grpo_settings(settings) if adv_estimator == "grpo" else None


def verl_grpo_settings(settings: GdpoSettings) -> GdpoSettings:
    """Return settings that reproduce verl's grpo with the same rewards, weights and conditions."""
    return replace(settings, group_norm="summed", batch_norm="none", eps=1e-6, combine=None)


def batch_metrics(
    rewards: RewardMatrix,
    counted_B: Bools,
    group_ids: Any,
    length_B: Ints,
    settings: GdpoSettings | None,
    bounds: Mapping[str, Bounds],
    sources: Sequence[str] | None = None,
) -> dict[str, float]:
    """Return all metrics of one step as {"gdpo/...": finite number}.

    Logs a warning, once for each reason, if the mean that step 3 subtracts is not about 0.

    Args:
        rewards: the rewards of all rows, after their conditions.
        counted_B: True for the rows that are samples.
        group_ids: one id per row; samples of one prompt share an id.
        length_B: response tokens of each row; with batch_norm="token", only the trained tokens.
        settings: the result of `settings_of_advantage`; with None, only the statistics of the
            rewards are computed.
        bounds: {reward: (low, high)} of the rewards with declared bounds.
        sources: the data source of each row, if each reward's mean is also told by data source.
    """
    values_BK, present_BK = rewards.values_BK[counted_B], rewards.present_BK[counted_B]
    group_B = np.unique(np.asarray(group_ids)[counted_B], return_inverse=True)[1]
    names = list(rewards.weights)
    found = _of_rewards(names, values_BK, present_BK, group_B, bounds)
    if sources is not None:
        found |= means_by_source(names, values_BK, present_BK, np.asarray(sources)[counted_B])
    if settings is not None:
        lengths = torch.from_numpy(length_B)
        scalars = scalars_of(rewards, counted_B, group_ids, settings, lengths)
        z_BK, S_B, A_B = (scalar.numpy()[counted_B] for scalar in scalars)
        weights_K = np.array(list(rewards.weights.values()))
        c_BK = contributions(z_BK, S_B, values_BK, weights_K, group_B, settings)
        found |= advantage_shares(names, c_BK, present_BK, S_B, A_B, group_B)
        found |= signal_statistics(c_BK, S_B, group_B)
        length_of_B = within_groups(length_B[counted_B], group_B)
        found["length_correlation"] = correlation(_without_rounding(A_B), length_of_B)
        kind_B = kinds(values_BK, present_BK, weights_K)
        for method, norm in METHODS.items():
            exact_B = advantages_without_eps(values_BK, weights_K, present_BK, group_B, norm)
            found[f"tied_pairs_{method}"] = tied_pairs(exact_B, kind_B, group_B)
            found[f"distinct_{method}"] = len(np.unique(exact_B))
        if settings.batch_norm != "none":
            by_token = settings.batch_norm == "token"
            found |= _of_batch_norm(S_B, c_BK, length_B[counted_B] if by_token else None)
    return {f"gdpo/{name}": float(value) for name, value in found.items() if value is not None}


def reward_statistics(
    value_B: Floats, present_B: Bools, group_B: Ints, bounds: Bounds | None
) -> Statistics:
    """Return statistics of one reward over the samples, and groups, that have it; std has ddof 0.

    Only `missing` is a share of all samples.
    """
    present = value_B[present_B]
    high_G = _group_max(value_B[present_B], group_B[present_B], group_B.max() + 1)
    low_G = -_group_max(-value_B[present_B], group_B[present_B], group_B.max() + 1)
    found: Statistics = {"missing": 1 - present_B.mean()}
    if not len(present):
        return found
    found["varies"] = (high_G > low_G)[np.isfinite(high_G)].mean()
    found |= {what: getattr(present, what)() for what in ("mean", "std", "min", "max")}
    if bounds is not None:
        low, high = bounds
        slack = BOUNDS_TOLERANCE * (high - low)
        found["at_low"] = (present <= low + slack).mean()
        found["at_high"] = (present >= high - slack).mean()
    return found


def means_by_source(
    names: list[str], values_BK: Floats, present_BK: Bools, source_B: npt.NDArray[Any]
) -> Statistics:
    """Return the mean of each reward over the samples of each data source that have it."""
    found: Statistics = {}
    for source in np.unique(source_B):
        has_BK = present_BK & (source_B == source)[:, None]
        for k in np.flatnonzero(has_BK.any(axis=0)):
            found[f"{names[k]}/mean/{source}"] = values_BK[has_BK[:, k], k].mean()
    return found


def correlation(x_B: npt.NDArray[Any], y_B: npt.NDArray[Any]) -> float | None:
    """Return Pearson's correlation; None if one of the two is constant."""
    units = []
    for values in (x_B, y_B):
        if not len(values) or values.min() == values.max():
            return None
        centred = values - values.mean()
        centred = centred / np.abs(centred).max()  # keeps the squares of small numbers above 0
        units.append(centred / np.linalg.norm(centred))
    return float(np.clip(units[0] @ units[1], -1, 1))


def within_groups(value_B: npt.NDArray[Any], group_B: Ints) -> Floats:
    """Return each value minus the mean of its group; what is only rounding becomes 0."""
    mean_G = np.bincount(group_B, value_B) / np.bincount(group_B).clip(min=1)
    centred_B: Floats = value_B - mean_G[group_B]
    centred_B[np.abs(centred_B) <= CENTRED_ROUNDING * np.abs(value_B).max(initial=0)] = 0
    return centred_B


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
    """
    if settings.group_norm == "per_reward":
        return z_BK * weights_K
    size_G = np.bincount(group_B)
    total_GK = np.stack([np.bincount(group_B, column) for column in values_BK.T], axis=1)
    c_BK = weights_K * (values_BK - (total_GK / size_G[:, None])[group_B])
    if not settings.normalize_by_std:
        return c_BK
    square_G = np.bincount(group_B, c_BK.sum(axis=1) ** 2)
    scale_G = np.sqrt(square_G / np.maximum(size_G - 1, 1)) + settings.eps
    signal_G = _group_max(np.abs(S_B), group_B, len(size_G)) > NO_SIGNAL
    return c_BK / np.where(signal_G, scale_G, 1.0)[group_B, None]


def advantage_shares(
    names: list[str],
    c_BK: Floats,
    present_BK: Bools,
    S_B: Floats,
    A_B: Floats,
    group_B: Ints,
) -> Statistics:
    """Return share, energy and correlation with A of each reward's contributions.

    The share is cov(c, S) / var(S): the shares of all rewards add up to 1 where S is the sum of the
    contributions, and one below 0 pulls against the others. The energy is the share of the squared
    contributions, of which rewards that cancel have much. Groups without a signal are left out, as
    nothing says how to scale their contributions. The correlation is over the samples that have the
    reward.
    """
    signal_G = _group_max(has_signal(S_B, c_BK).astype(float), group_B, group_B.max() + 1)
    c_BK = np.where((signal_G > 0)[group_B, None], c_BK, 0.0)
    scale = np.abs(c_BK).max() or 1.0  # keeps the squares of small numbers above 0
    energy_K = ((c_BK / scale) ** 2).sum(axis=0)
    centred_B = np.where(np.abs(S_B) > NO_SIGNAL, S_B, 0.0) / scale
    centred_B = centred_B - centred_B.mean()
    share_K = (c_BK / scale).T @ centred_B
    found: Statistics = {}
    for k, name in enumerate(names):
        of_S = share_K[k] / (centred_B @ centred_B) if centred_B.any() else None
        found[f"{name}/share"] = of_S
        found[f"{name}/energy"] = energy_K[k] / energy_K.sum() if energy_K.any() else None
        has_B = present_BK[:, k]
        found[f"{name}/correlation"] = correlation(c_BK[has_B, k], _without_rounding(A_B)[has_B])
    return found


def has_signal(S_B: Floats, c_BK: Floats) -> Bools:
    """Return True for the samples with an S that is above both tolerances."""
    enough_B: Bools = np.abs(S_B) > np.maximum(NO_SIGNAL, CANCELLED * np.abs(c_BK).sum(axis=1))
    return enough_B


def signal_statistics(c_BK: Floats, S_B: Floats, group_B: Ints) -> Statistics:
    """Return the share of samples with cancelling rewards, and of groups without any signal."""
    signal_B = has_signal(S_B, c_BK)
    contributes_B = (np.abs(c_BK) > NO_SIGNAL).any(axis=1)
    groups_with_signal = len(np.unique(group_B[signal_B]))
    return {
        "cancelled": (contributes_B & ~signal_B).mean(),
        "no_signal": 1 - groups_with_signal / len(np.unique(group_B)),
    }


def advantages_without_eps(
    values_BK: Floats, weights_K: Floats, present_BK: Bools, group_B: Ints, group_norm: GroupNorm
) -> Floats:
    """Return S with eps=0, rounded, so that advantages that are the same are equal numbers.

    eps must be 0 because it makes the rewards (0, 1) and (0, 2) different in GRPO. Without eps, a
    rounding error of the input would become an advantage. So each reward, or the sum, is rounded to
    1e-12 of its largest value: this is far above the error of a float64 sum (1e-15), and below any
    difference that a scorer means. If rewards spread over 1 % of their size, advantages are then
    right to about 1e-10; they count as equal if 6 decimals agree. Step 3 only scales, so it is left
    out.
    """
    if group_norm == "summed":
        values_BK = (values_BK @ weights_K)[:, None]
        weights_K, present_BK = np.ones(1), np.ones_like(present_BK[:, :1])
    largest_K = np.abs(values_BK).max(axis=0)
    values_BK = np.round(values_BK / np.where(largest_K > 0, largest_K, 1.0), 12)
    S_B = compute_gdpo_scalars(
        values_BK,
        group_B,
        weights=weights_K / (np.abs(weights_K).max() or 1.0),
        present_BK=present_BK,
        batch_norm="none",
        eps=0.0,
    ).S_B
    rounded_B: Floats = S_B.numpy().round(6) + 0.0  # -0.0 becomes 0.0
    return rounded_B


def mean_and_std(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> tuple[float, float]:
    """Return the mean and the std of S (ddof 1), counting sample i `count_B[i]` times."""
    count_B = np.ones(len(S_B)) if count_B is None else count_B
    mean = (S_B * count_B).sum() / max(count_B.sum(), 1)
    variance = ((S_B - mean) ** 2 * count_B).sum() / max(count_B.sum() - 1, 1)
    return float(mean), float(np.sqrt(variance))


def why_mean_is_not_0(S_B: Floats, c_BK: Floats, count_B: Ints | None) -> str | None:
    """Return why the mean of S is not 0 in this batch; None if it is about 0.

    In every group, the z of a reward sum to 0 over the samples that have it. So the weighted sum
    has the mean 0. There are three exceptions: samples do not count equally, S is not the weighted
    sum, or float64 has too few digits.
    """
    if _is_about_0(S_B, count_B):
        return None
    if _is_about_0(S_B):
        return "batch_norm=token counts samples by their tokens, and S depends on the length"
    if _is_about_0(c_BK.sum(axis=1)):
        return "algorithm.gdpo.combine gives an S that is not 0 on average"
    return (
        "a reward is so large, compared with its spread within a group, that float64 cannot "
        "resolve it; let the scorer subtract a typical value from it"
    )


def _of_rewards(
    names: list[str],
    values_BK: Floats,
    present_BK: Bools,
    group_B: Ints,
    bounds: Mapping[str, Bounds],
) -> Statistics:
    found: Statistics = {}
    for k, name in enumerate(names):
        of_one = reward_statistics(values_BK[:, k], present_BK[:, k], group_B, bounds.get(name))
        found |= {f"{name}/{what}": value for what, value in of_one.items()}
    for j, k in combinations(range(len(names)), 2):
        both_B = present_BK[:, j] & present_BK[:, k]
        of_both = (within_groups(values_BK[both_B, n], group_B[both_B]) for n in (j, k))
        found[f"{names[j]}/correlation_with_{names[k]}"] = correlation(*of_both)
    return found


def _of_batch_norm(S_B: Floats, c_BK: Floats, count_B: Ints | None) -> Statistics:
    if (reason := why_mean_is_not_0(S_B, c_BK, count_B)) is not None:
        _warn_once(reason)
    mean, std = mean_and_std(S_B, count_B)
    return {"batch_norm_mean": mean, "batch_norm_std": std}


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("verl-gdpo: gdpo/batch_norm_mean is not about 0, because %s", reason)


def _is_about_0(S_B: Floats, count_B: Ints | None = None) -> bool:
    mean, std = mean_and_std(S_B, count_B)
    return abs(mean) <= max(NO_SIGNAL, MEAN_TOLERANCE * std)


def _without_rounding(A_B: Floats) -> Floats:
    return np.where(np.abs(A_B) > NO_SIGNAL, A_B, 0.0)


def _group_max(values: Floats, group: Ints, group_count: int) -> Floats:
    """Return the largest value of each group, -inf for a group without values."""
    highest_G = np.full(group_count, -np.inf)
    np.maximum.at(highest_G, group, values)
    return highest_G
