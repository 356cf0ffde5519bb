"""What the rewards and the advantages of a step look like; docs/metrics.md says how to read each.

Shape suffixes: B samples, K rewards, G groups. Samples are those that count: no padding, one row a
session. What a batch does not define, such as the correlation with a constant, is None or left out.
"""

import functools
import logging
from collections.abc import Mapping
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
from verl_gdpo.settings.algorithm import GdpoSettings

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Statistics = dict[str, float | None]

METHODS: dict[str, GroupNorm] = {"gdpo": "per_reward", "grpo": "summed"}

# a sum of normalised rewards, or an advantage, below it says nothing. What float64 rounds is 0
# already (group_norm.py); what a scorer computed in float32 and handed over as float64 is not
TOLERANCE = 1e-8
# so is an S below this share of what it is the sum of: where rewards of different spread cancel,
# eps leaves about eps / spread of them
CANCELLED = 1e-3
# a mean of S further from 0, in units of its std, is no rounding
MEAN_TOLERANCE = 1e-6


def settings_of_advantage(adv_estimator: str, settings: GdpoSettings) -> GdpoSettings | None:
    """Under which settings ours gives the advantage of this estimator; None: under none.

    verl's grpo differs in one case, a group of a single sample, which it leaves at its raw score.
    """
    if adv_estimator == "gdpo":
        return settings
    return verl_grpo_settings(settings) if adv_estimator == "grpo" else None


def verl_grpo_settings(settings: GdpoSettings) -> GdpoSettings:
    """verl's grpo on the rewards, weights and conditions of `settings`."""
    return replace(settings, group_norm="summed", batch_norm="none", eps=1e-6, combine=None)


def batch_metrics(
    rewards: RewardMatrix,
    counted_B: Bools,
    group_ids: Any,
    length_B: Ints,
    settings: GdpoSettings | None,
    bounds: Mapping[str, Bounds],
) -> dict[str, float]:
    """All metrics of one step, {"gdpo/...": a finite number}.

    Warns, once for each reason, if the mean that step 3 subtracts is not about 0.

    Args:
        rewards: those of all rows, conditions applied.
        counted_B: the rows that are samples.
        group_ids: one per row; samples of one prompt share it.
        length_B: response tokens of each row; with batch_norm="token", those that are trained.
        settings: those of `settings_of_advantage`; None for statistics of the rewards alone.
        bounds: {reward: (low, high)} where declared.
    """
    values_BK, present_BK = rewards.values_BK[counted_B], rewards.present_BK[counted_B]
    group_B = np.unique(np.asarray(group_ids)[counted_B], return_inverse=True)[1]
    names = list(rewards.weights)
    found = _of_rewards(names, values_BK, present_BK, group_B, bounds)
    if settings is not None:
        lengths = torch.from_numpy(length_B)
        scalars = scalars_of(rewards, counted_B, group_ids, settings, lengths)
        z_BK, S_B, A_B = (scalar.numpy()[counted_B] for scalar in scalars)
        weights_K = np.array(list(rewards.weights.values()))
        c_BK = contributions(z_BK, S_B, values_BK, weights_K, group_B, settings)
        found |= advantage_shares(names, c_BK, A_B)
        found |= signal_statistics(c_BK, S_B, group_B)
        found["length_correlation"] = correlation(_without_rounding(A_B), length_B[counted_B])
        for method, norm in METHODS.items():
            count = distinct_advantages(values_BK, weights_K, present_BK, group_B, norm)
            found[f"distinct_{method}"] = count
        if settings.batch_norm != "none":
            by_token = settings.batch_norm == "token"
            found |= _of_batch_norm(S_B, c_BK, length_B[counted_B] if by_token else None)
    return {f"gdpo/{name}": float(value) for name, value in found.items() if value is not None}


def reward_statistics(
    value_B: Floats, present_B: Bools, group_B: Ints, bounds: Bounds | None
) -> Statistics:
    """Of one reward, over the samples that have it; std as verl's (ddof 0)."""
    present = value_B[present_B]
    high_G = _group_max(value_B[present_B], group_B[present_B], group_B.max() + 1)
    low_G = -_group_max(-value_B[present_B], group_B[present_B], group_B.max() + 1)
    found: Statistics = {"missing": 1 - present_B.mean(), "varies": (high_G > low_G).mean()}
    if not len(present):
        return found
    found |= {what: getattr(present, what)() for what in ("mean", "std", "min", "max")}
    if bounds is not None:
        low, high = bounds
        slack = BOUNDS_TOLERANCE * (high - low)
        found["at_low"] = (present <= low + slack).mean()
        found["at_high"] = (present >= high - slack).mean()
    return found


def correlation(x_B: npt.NDArray[Any], y_B: npt.NDArray[Any]) -> float | None:
    """Pearson's; None if one of them is constant."""
    units = []
    for values in (x_B, y_B):
        if not len(values) or values.min() == values.max():
            return None
        centred = values - values.mean()
        centred = centred / np.abs(centred).max()  # or the squares of small numbers would be 0
        units.append(centred / np.linalg.norm(centred))
    return float(np.clip(units[0] @ units[1], -1, 1))


def contributions(
    z_BK: Floats,
    S_B: Floats,
    values_BK: Floats,
    weights_K: Floats,
    group_B: Ints,
    settings: GdpoSettings,
) -> Floats:
    """What each reward adds to S, (B, K); over the rewards it sums to S.

    per_reward: w z. summed: w (r - mean_g r) / (std_g R + eps), R the weighted sum, what is missing
    being 0 as it is in R. In a group without signal it is not divided: there is nothing but eps to
    divide by, and what cancels there would drown the rest.
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
    signal_G = _group_max(np.abs(S_B), group_B, len(size_G)) > TOLERANCE
    return c_BK / np.where(signal_G, scale_G, 1.0)[group_B, None]


def advantage_shares(names: list[str], c_BK: Floats, A_B: Floats) -> Statistics:
    """Of each reward: the signed correlation of its contribution with A, and its energy."""
    largest = np.abs(c_BK).max() or 1.0
    energy_K = ((c_BK / largest) ** 2).sum(axis=0)
    found: Statistics = {}
    for k, name in enumerate(names):
        found[f"{name}/correlation"] = correlation(c_BK[:, k], _without_rounding(A_B))
        found[f"{name}/energy"] = energy_K[k] / energy_K.sum() if energy_K.any() else None
    return found


def has_signal(S_B: Floats, c_BK: Floats) -> Bools:
    """Samples whose S is more than rounding and what eps leaves of contributions that cancel."""
    enough_B: Bools = np.abs(S_B) > np.maximum(TOLERANCE, CANCELLED * np.abs(c_BK).sum(axis=1))
    return enough_B


def signal_statistics(c_BK: Floats, S_B: Floats, group_B: Ints) -> Statistics:
    """Shares of samples whose rewards cancel, and of groups in which no sample has a signal."""
    signal_B = has_signal(S_B, c_BK)
    contributes_B = (np.abs(c_BK) > TOLERANCE).any(axis=1)
    groups_with_signal = len(np.unique(group_B[signal_B]))
    return {
        "cancelled": (contributes_B & ~signal_B).mean(),
        "no_signal": 1 - groups_with_signal / len(np.unique(group_B)),
    }


def distinct_advantages(
    values_BK: Floats, weights_K: Floats, present_BK: Bools, group_B: Ints, group_norm: GroupNorm
) -> int:
    """Number of distinct advantages with eps=0, since eps tells (0, 1) and (0, 2) apart in GRPO.

    Without eps a rounding error of the input would become an advantage. So each reward, or the sum,
    is rounded to 1e-12 of its largest value: far above the error of a float64 sum (1e-15), below
    what a scorer means. That leaves advantages right to about 1e-10 where rewards spread over 1 %
    of their size, and they count as equal if 6 decimals are. Step 3 is left out, being one scale.
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
    return len(np.unique(S_B.numpy().round(6)))


def mean_and_std(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> tuple[float, float]:
    """What step 3 subtracts and divides by (eps aside), each sample counted `count_B` times."""
    count_B = np.ones(len(S_B)) if count_B is None else count_B
    mean = (S_B * count_B).sum() / max(count_B.sum(), 1)
    variance = ((S_B - mean) ** 2 * count_B).sum() / max(count_B.sum() - 1, 1)
    return float(mean), float(np.sqrt(variance))


def why_mean_is_not_0(S_B: Floats, c_BK: Floats, count_B: Ints | None) -> str | None:
    """The reason on this batch; None if the mean is about 0.

    A reward's z sum to 0 over the samples of a group that have it, be the group incomplete, a
    single sample or lacking the reward. So does their weighted sum, and so its mean is 0 unless
    samples count differently, S is no weighted sum, or float64 runs out of digits.
    """
    if _is_about_0(S_B, count_B):
        return None
    if _is_about_0(S_B):
        return "batch_norm=token counts samples by their tokens, and S differs with the length"
    if _is_about_0(c_BK.sum(axis=1)):
        return "algorithm.gdpo.combine gives an S that is not 0 on average"
    return (
        "a reward is so large against its spread within a group that float64 cannot resolve it; "
        "let the scorer return its difference from a typical value"
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
        found[f"{names[j]}/correlation_with_{names[k]}"] = correlation(
            values_BK[both_B, j], values_BK[both_B, k]
        )
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
    return abs(mean) <= max(TOLERANCE, MEAN_TOLERANCE * std)


def _without_rounding(A_B: Floats) -> Floats:
    return np.where(np.abs(A_B) > TOLERANCE, A_B, 0.0)


def _group_max(values: Floats, group: Ints, group_count: int) -> Floats:
    """-inf for a group without values."""
    highest_G = np.full(group_count, -np.inf)
    np.maximum.at(highest_G, group, values)
    return highest_G
