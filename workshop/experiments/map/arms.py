"""The advantages of every arm, for many runs at once.

`verl_gdpo.algorithm` computes one batch at a time, and a map of hundreds of thousands of runs needs
thousands of batches at once. So the equation is written here a second time, for binary and bounded
rewards without missing values; `tests/workshop/test_map.py` compares each arm with the package to
1e-6.

Shape letters: K rewards, G samples of a group, P prompts; R stands for any number of axes in
between, each entry a run of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

GDPO_EPS = 1e-4  # the paper's
GRPO_EPS = 1e-6  # verl's
ROUNDING = 1e-5  # a sum this much smaller than its terms is 0: rewards that cancel


@dataclass(frozen=True)
class Rewards:
    """Rewards of one step of each run, and their parts that several arms need."""

    raw_KGRP: np.ndarray
    bound_K: np.ndarray  # the highest value that is possible; the lowest is 0
    centred_KGRP: np.ndarray  # minus the mean of the group; exactly 0 in a constant group
    std_KRP: np.ndarray  # of the group, ddof 1
    range_KRP: np.ndarray  # what the reward is worth for the prompt, if it is met

    @classmethod
    def of(cls, raw_KGRP: np.ndarray, bound_K: np.ndarray, range_KRP: np.ndarray) -> "Rewards":
        centred, std = _centre(raw_KGRP, axis=1)
        return cls(raw_KGRP, bound_K, centred, std, range_KRP)

    def z_KGRP(self) -> np.ndarray:
        return self.centred_KGRP / (self.std_KRP + GDPO_EPS)[:, None]


def _per_reward(values_K: np.ndarray, like: np.ndarray) -> np.ndarray:
    return values_K.reshape(-1, *[1] * (like.ndim - 1))


def _centre(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Values minus their mean over the group, and their std."""
    varies = values.max(axis, keepdims=True) > values.min(axis, keepdims=True)
    # the mean of equal numbers can differ from them by a rounding error
    centred = (values - values.mean(axis, keepdims=True)) * varies
    std = np.sqrt(np.square(centred).sum(axis) / (values.shape[axis] - 1))
    return centred, std


def _total(terms_KGRP: np.ndarray) -> np.ndarray:
    """The sum over the rewards; exactly 0 where they cancel."""
    total = terms_KGRP.sum(0)
    size = terms_KGRP[0] * 0
    for term in terms_KGRP:
        size += np.abs(term)
    return np.where(np.abs(total) <= ROUNDING * size, 0, total)


def _batch_norm(S_GRP: np.ndarray) -> np.ndarray:
    """Step 3 of the equation; the batch is the G samples of the P prompts of one run."""
    count = S_GRP.shape[0] * S_GRP.shape[-1]
    centred = S_GRP - S_GRP.mean((0, -1), keepdims=True)
    std = np.sqrt(np.square(centred).sum((0, -1), keepdims=True) / (count - 1))
    return np.where(std > 0, centred / (std + GDPO_EPS), 0)


def grpo(
    rewards: Rewards, scale: str = "none", std: bool = True, batch_norm: bool = False
) -> np.ndarray:
    """Normalise the sum of the rewards, each of them first divided by its scale.

    Args:
        scale: "none", "range" (what is known of the reward before training), "prompt range" (the
            same for each prompt), or "spread" (the reward's standard deviation within the groups,
            pooled over the groups of the batch).
    """
    terms = rewards.centred_KGRP
    if scale == "range":
        terms = terms / _per_reward(rewards.bound_K, terms)
    elif scale == "prompt range":
        terms = terms / rewards.range_KRP[:, None]
    elif scale == "spread":
        pooled = np.sqrt(np.square(rewards.std_KRP).mean(-1))[:, None, ..., None]
        terms = terms / np.where(pooled > 0, pooled, 1)
    S_GRP = _total(terms)
    if std:
        S_GRP = S_GRP / (_centre(S_GRP, axis=0)[1] + (GDPO_EPS if batch_norm else GRPO_EPS))
    return _batch_norm(S_GRP) if batch_norm else S_GRP


def gdpo(rewards: Rewards, by_range: bool = False, batch_norm: bool = True) -> np.ndarray:
    """GDPO; `by_range` makes the bound of each reward its weight."""
    z_KGRP = rewards.z_KGRP()
    if by_range:
        z_KGRP = z_KGRP * _per_reward(rewards.bound_K, z_KGRP)
    S_GRP = _total(z_KGRP)
    return _batch_norm(S_GRP) if batch_norm else S_GRP


# the variants: their formulas and sources are in `verl_gdpo.algorithm.variants`


def rvpo(rewards: Rewards, k: float = 1.0) -> np.ndarray:
    S_GRP = -np.log(np.exp(-k * rewards.z_KGRP()).mean(0)) / k
    return _batch_norm(S_GRP)


def dara(rewards: Rewards, maximum: float = 5.0) -> np.ndarray:
    groups_KR = (rewards.std_KRP > 0).sum(-1)
    factor_KR = np.sqrt(groups_KR.max(0) / np.maximum(groups_KR, 1)).clip(max=maximum)
    factor_KR = factor_KR.astype(rewards.raw_KGRP.dtype)
    return _batch_norm(_total(factor_KR[:, None, ..., None] * rewards.z_KGRP()))


def sa_mrpo(rewards: Rewards, gamma: float = 0.5) -> np.ndarray:
    mean_KR = rewards.raw_KGRP.mean((1, -1))
    room_KR = (1 - mean_KR / _per_reward(rewards.bound_K, mean_KR)).clip(0, 1)
    return _batch_norm(_total(room_KR[:, None, ..., None] ** gamma * rewards.z_KGRP()))


def gd2po(rewards: Rewards, tau: float = 0.5) -> np.ndarray:
    z_KGRP = rewards.z_KGRP()
    S_GRP = _total(z_KGRP)
    dropped = np.abs(S_GRP) < tau * np.abs(z_KGRP).sum(0)
    return _batch_norm(np.where(dropped, 0, S_GRP))


def dvao(rewards: Rewards) -> np.ndarray:
    scale_RP = rewards.std_KRP.sum(0)
    return _batch_norm(_total(rewards.centred_KGRP) / np.where(scale_RP > 0, scale_RP, 1))


# (rewards) -> advantage of each sample, (G, R, P)
ARMS: Mapping[str, Callable[[Rewards], np.ndarray]] = {
    "gdpo": gdpo,
    "grpo": grpo,
    "grpo_range": partial(grpo, scale="range"),
    "grpo_prompt_range": partial(grpo, scale="prompt range"),
    "grpo_spread": partial(grpo, scale="spread"),
    "grpo_batch_norm": partial(grpo, batch_norm=True),
    "grpo_no_std": partial(grpo, std=False),
    "grpo_spread_no_std": partial(grpo, scale="spread", std=False),
    "gdpo_weighted": partial(gdpo, by_range=True),
    "gdpo_no_batch_norm": partial(gdpo, batch_norm=False),
    "rvpo": rvpo,
    "rvpo_mild": partial(rvpo, k=0.3),
    "dara": dara,
    "sa_mrpo": sa_mrpo,
    "gd2po": gd2po,
    "dvao": dvao,
}
FIRST_ARMS = ("gdpo", "grpo", "grpo_range", "grpo_prompt_range")  # those of the rules
