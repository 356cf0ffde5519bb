"""The metrics of a batch of four groups with the rewards x and y."""

import numpy as np

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.metrics import batch_metrics
from verl_gdpo.algorithm.settings import GdpoSettings

# a: the rewards oppose each other. b: they agree. c: they are constant. d: y alone varies
GROUPS = list("aabbccdd")
REWARDS = [[0, 1], [1, 0], [0, 0], [1, 1], [1, 1], [1, 1], [0, 0], [0, 1]]
LENGTHS = [10, 10, 10, 30, 20, 20, 15, 25]
EXACT = GdpoSettings(eps=0.0)


def matrix(rewards, weights=None, present=None):
    rewards = np.array(rewards, dtype=float)
    present = np.ones(rewards.shape, dtype=bool) if present is None else np.array(present)
    weights = weights or [1.0] * rewards.shape[1]
    return RewardMatrix(dict(zip("xyuv", weights, strict=False)), rewards * present, present)


def of_batch(settings=EXACT, rewards=REWARDS, groups=GROUPS, lengths=LENGTHS, **kwargs):
    bounds, sources = kwargs.pop("bounds", {}), kwargs.pop("sources", None)
    counted = np.array(kwargs.pop("counted", [True] * len(groups)))
    given = matrix(rewards, **kwargs)
    return batch_metrics(given, counted, groups, np.array(lengths), settings, bounds, sources)
