"""What each reward adds to the sum that becomes the advantage, and what is left of it.

Shape suffixes: B samples, K rewards, G groups. Samples are the rows that count.
"""

from collections.abc import Sequence

import numpy as np

from verl_gdpo.advantage.zero import has_signal, is_0, or_0
from verl_gdpo.batch.within_groups import Bools, Floats, Ints, correlation
from verl_gdpo.settings.algorithm import GdpoSettings

Statistics = dict[str, float | None]


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
    signal_G = np.bincount(group_B, ~is_0(S_B)) > 0
    return c_BK / np.where(signal_G, scale_G, 1.0)[group_B, None]


def advantage_shares(
    names: Sequence[str],
    c_BK: Floats,
    present_BK: Bools,
    S_B: Floats,
    A_B: Floats,
) -> Statistics:
    """Return share, energy and correlation with A of each reward's contributions.

    The share is cov(c, S) / var(S): the shares of all rewards add up to 1 where S is the sum of the
    contributions, and one below 0 pulls against the others. The energy is the share of the squared
    contributions, of which rewards that cancel have much. The correlation is over the samples that
    have the reward.

    Args:
        c_BK: 0 in groups without a signal, as nothing says how to scale their contributions.
    """
    scale = np.abs(c_BK).max() or 1.0  # keeps the squares of small numbers above 0
    energy_K = ((c_BK / scale) ** 2).sum(axis=0)
    covariance_K, variance = covariances(c_BK / scale, or_0(S_B) / scale)
    A_B = or_0(A_B)
    found: Statistics = {}
    for k, name in enumerate(names):
        found[f"{name}/share"] = covariance_K[k] / variance if variance else None
        found[f"{name}/energy"] = energy_K[k] / energy_K.sum() if energy_K.any() else None
        has_B = present_BK[:, k]
        found[f"{name}/correlation"] = correlation(c_BK[has_B, k], A_B[has_B])
    return found


def covariances(c_BK: Floats, S_B: Floats) -> tuple[Floats, float]:
    """Return, both times the number of samples, cov(c, S) of each reward and var(S)."""
    centred_B = S_B - S_B.mean()
    return c_BK.T @ centred_B, float(centred_B @ centred_B)


def groups_with_signal(S_B: Floats, c_BK: Floats, group_B: Ints) -> Bools:
    """Return signal_G, True for the groups with a sample that has a signal."""
    return np.bincount(group_B, has_signal(S_B, c_BK)) > 0
