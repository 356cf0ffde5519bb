"""The `gdpo/` metrics of a step; docs/metrics.md says how to read each of them.

Shape suffixes: B samples, K rewards, G groups. Samples are the rows that count: padding is left
out, and each session has one row. A metric that a batch does not define, such as the correlation
with a constant, is None or left out.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm import advantages, zero
from verl_gdpo.algorithm.advantages import Statistics
from verl_gdpo.algorithm.equation import GdpoScalars
from verl_gdpo.algorithm.equation_inputs import VERL_EPS, group_index, has_a_reward
from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.reward_metrics import RewardsOfStep, Sources
from verl_gdpo.algorithm.samples import ABSENT, NOTES_KEY, RewardRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Bools, Floats, Ints

logger = logging.getLogger(__name__)


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
    step = RewardsOfStep([*rewards.weights], values_BK, present_BK, group_B, bounds)
    found = step.statistics() | step.correlations()
    told = None
    if sources is not None:
        rows = np.flatnonzero(counted_B).tolist()
        told = Sources.of([sources[row] for row in rows], group_B)
        found |= step.by_source(told)
    if settings is not None:
        if scalars is None:
            tokens_B = torch.from_numpy(length_B)
            scalars = advantages.scalars_of(rewards, counted_B, group_ids, settings, tokens_B)
        z_BK, S_B, A_B = (scalar.numpy()[rows_B] for scalar in scalars)
        weights_K = np.array(list(rewards.weights.values()))
        c_BK = advantages.contributions(z_BK, S_B, step.values_BK, weights_K, group_B, settings)
        found |= _of_advantage(step, c_BK, S_B, A_B, length_B[rows_B], told)
        found |= _of_ties(step, weights_K)
        if settings.batch_norm != "none":
            times_B = length_B[rows_B] if settings.batch_norm == "token" else 1
            count_B = has_a_reward(step.present_BK, weights_K) * times_B
            found |= _of_batch_norm(S_B, c_BK, count_B)
    return {f"gdpo/{name}": float(value) for name, value in found.items() if value is not None}


def scoring_metrics(rows: RewardRows) -> dict[str, float]:
    """Return {"gdpo/scoring/<note>": mean over the samples whose scorer left notes}."""
    column = rows.columns.get(NOTES_KEY, [ABSENT] * len(rows))
    counted = np.flatnonzero(rows.counted_B).tolist()
    notes = [column[row] for row in counted if column[row] is not ABSENT]
    names = notes[0] if notes else ()
    return {f"gdpo/scoring/{name}": float(np.mean([n[name] for n in notes])) for name in names}


def mean_and_std(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> tuple[float, float]:
    """Return the mean and the std of S (ddof 1), counting sample i `count_B[i]` times."""
    count_B = np.ones(len(S_B)) if count_B is None else count_B
    mean = (S_B * count_B).sum() / max(count_B.sum(), 1)
    variance = ((S_B - mean) ** 2 * count_B).sum() / max(count_B.sum() - 1, 1)
    return float(mean), float(np.sqrt(variance))


def why_mean_is_not_0(S_B: Floats, c_BK: Floats, count_B: npt.NDArray[Any] | None) -> str | None:
    """Return why the mean of S is not 0 in this batch; None if it is about 0.

    In every group, the z of a reward sum to 0 over the samples that have it. So the weighted sum
    has the mean 0. There are three exceptions: samples do not count equally, S is not the weighted
    sum, or float64 has too few digits.
    """
    if _is_about_0(S_B, count_B):
        return None
    if _is_about_0(S_B):
        if count_B is not None and count_B.max() <= 1:
            return "group_norm=summed counts samples without any reward, and this step does not"
        return "batch_norm=token counts samples by their tokens, and S depends on the length"
    if _is_about_0(c_BK.sum(axis=1)):
        return "algorithm.gdpo.combine gives an S that is not 0 on average"
    return (
        "a reward is so large, compared with its spread within a group, that float64 cannot "
        "resolve it; let the scorer subtract a typical value from it"
    )


def _of_advantage(
    step: RewardsOfStep,
    c_BK: Floats,
    S_B: Floats,
    A_B: Floats,
    length_B: Ints,
    sources: Sources | None,
) -> Statistics:
    signal_B = zero.has_signal(S_B, c_BK)
    signal_G = np.bincount(step.group_B, signal_B) > 0
    c_or_0_BK = np.where(signal_G[step.group_B, None], c_BK, 0.0)
    found = advantages.advantage_shares(step.names, c_or_0_BK, step.present_BK, S_B, A_B)
    found["cancelled"] = (~signal_B & ~zero.is_0(c_BK).all(axis=1)).mean()
    found["no_signal"] = 1 - signal_G.mean()
    found |= step.updates_from_low(zero.or_0(A_B))
    if sources is not None:
        of_each = sources.of_groups(~signal_G, np.ones_like(signal_G))
        found |= {f"no_signal/{name}": share for name, share in of_each.items()}
    length_of_B = advantages.within_groups(length_B, step.group_B)
    found["length_correlation"] = advantages.correlation(zero.or_0(A_B), length_of_B)
    return found


def _of_ties(step: RewardsOfStep, weights_K: Floats) -> Statistics:
    of_rewards = step.values_BK, step.present_BK
    exact = advantages.advantages_without_eps(*of_rewards, weights_K, step.group_B)
    tied = advantages.tied_pairs(exact, *of_rewards, weights_K, step.group_B)
    found: Statistics = {}
    for method, A_B, share in zip(("gdpo", "grpo"), exact, tied, strict=True):
        found |= {f"tied_pairs_{method}": share, f"distinct_{method}": len(np.unique(A_B))}
    return found


def _of_batch_norm(S_B: Floats, c_BK: Floats, count_B: npt.NDArray[Any]) -> Statistics:
    if (reason := why_mean_is_not_0(S_B, c_BK, count_B)) is not None:
        _warn_once(reason)
    mean, std = mean_and_std(S_B, count_B)
    return {"batch_norm_mean": mean, "batch_norm_std": std}


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("verl-gdpo: gdpo/batch_norm_mean is not about 0, because %s", reason)


def _is_about_0(S_B: Floats, count_B: npt.NDArray[Any] | None = None) -> bool:
    return zero.is_mean_0(*mean_and_std(S_B, count_B))
