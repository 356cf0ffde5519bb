"""Whether weights that keep GRPO's shares are found wherever they exist: a table of RESULTS.md.

A dump has the rewards of few groups, whose sizes, ranges and correlations are drawn. By another
method than that of the tools, it is known of each whether such weights exist: for two rewards, a
scan of their ratio finds where the share crosses the target; for more, a general solver starts from
many places. Shape suffixes: B samples, K rewards, G groups, N samples a group.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.zero import SAME_SHARE, Floats
from verl_gdpo.tools.advice import GDPO, Evidence
from verl_gdpo.tools.share_weights import shares

DUMPS, FIRST_SEED = 180, 5_000
STARTS = 300  # of the general solver
LOWEST, HIGHEST = -6.0, 6.0  # of the decimal logarithm of a ratio of factors
SCANNED = 200_001  # ratios between them
LONGEST = 40.0  # of the logarithm of a ratio, for the general solver


class Found(NamedTuple):
    """Of a dump: whether weights with GRPO's shares exist, and who finds them."""

    rewards: int
    exist: bool  # by the other method, or as the tools have found them
    by_tools: bool
    by_one_start: bool  # a solver that starts from the spreads alone


def dump(seed: int) -> Evidence:
    """Return two to five rewards of 4 to 40 groups, of which each varies somewhere."""
    rng = np.random.default_rng(seed)
    K, G, N = int(rng.integers(2, 6)), int(rng.integers(4, 41)), 8
    while True:
        columns = [_reward(rng, G, N) for _ in range(K)]
        skill_GN = rng.normal(size=(G, N))
        values_BK = np.stack([make(skill_GN) for make in columns], axis=-1).reshape(G * N, K)
        rewards = RewardMatrix(
            {f"reward {k}": 1.0 for k in range(K)}, values_BK, np.ones(values_BK.shape, bool)
        )
        evidence = Evidence([(rewards, np.ones(G * N, bool), np.repeat(np.arange(G), N))], GDPO)
        if (evidence.spread_K > 0).all() and evidence.updates[0].share_K.any():
            return evidence


def _reward(rng: np.random.Generator, G: int, N: int) -> Callable[[Floats], Floats]:
    """Return a reward of the skill of samples: how it depends on it is drawn."""
    along = rng.uniform(-1, 1)
    own_GN = rng.normal(size=(G, N))
    prompt_G1 = rng.normal(size=(G, 1)) * rng.uniform(0, 2)
    size = 10.0 ** rng.uniform(-2, 1)
    kind = rng.choice(["met or not", "graded", "continuous"])

    def reward(skill_GN: Floats) -> Floats:
        latent_GN = along * skill_GN + np.sqrt(1 - along**2) * own_GN + prompt_G1
        if kind == "met or not":
            return np.asarray(size * (latent_GN > rng.uniform(-1, 1.5)))
        if kind == "graded":
            return np.asarray(size * np.clip(np.floor(2 * latent_GN) + 2, 0, 4) / 4)
        return np.asarray(size * latent_GN)

    return reward


def found(evidence: Evidence) -> Found:
    square_KK, target_K = evidence.equations()
    keeping = evidence.keeping_weights()
    by_tools = keeping is not None and keeping.is_kept
    if len(target_K) == 2:
        exist = _scanned(square_KK, target_K)
    else:
        rng = np.random.default_rng(0)
        starts = (rng.uniform(-3, 3, len(target_K)) * np.log(10) for _ in range(STARTS))
        exist = any(_solved(square_KK, target_K, log_K) for log_K in starts)
    by_one_start = _solved(square_KK, target_K, np.log(evidence.spread_K))
    return Found(len(target_K), exist or by_tools, by_tools, by_one_start)


def _scanned(square_KK: Floats, target_K: Floats) -> bool:
    """Whether the first of two rewards has its share at some ratio of the factors."""
    unit_K = 1 / np.sqrt(np.diag(square_KK))
    correlation = square_KK[0, 1] * unit_K[0] * unit_K[1]
    ratio = np.logspace(LOWEST, HIGHEST, SCANNED)
    share = (1 + correlation * ratio) / (1 + 2 * correlation * ratio + ratio**2)
    missed = share - target_K[0]
    crosses = (np.sign(missed[1:]) != np.sign(missed[:-1])).any()
    return bool(crosses or np.abs(missed).min() < SAME_SHARE)


def _solved(square_KK: Floats, target_K: Floats, log_K: Floats) -> bool:
    """Whether a general solver gets from these logarithms of factors to the shares.

    The first factor stays 1, because the scale of all of them together changes no share.
    """

    def missed(others: Floats) -> Floats:
        log_K = np.clip(np.append(0.0, others), -LONGEST, LONGEST)
        return (shares(square_KK, np.exp(log_K)) - target_K)[1:]

    solution = optimize.root(missed, (log_K - log_K[0])[1:], method="hybr", tol=1e-13)
    is_inside = np.abs(solution.x).max() < LONGEST
    return bool(is_inside and np.abs(missed(solution.x)).max() < SAME_SHARE / len(target_K))


def results(count: int = DUMPS) -> Iterator[Found]:
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        yield found(dump(seed))


def table(of_dumps: Sequence[Found]) -> str:
    """How many dumps have such weights, and in how many they are found, by their rewards."""
    lines = ["| rewards | dumps | such weights exist | found | found from one start |"]
    lines.append("|---" * 5 + "|")
    counts: list[int | None] = [*sorted({one.rewards for one in of_dumps}), None]
    for rewards in counts:
        of_these = [one for one in of_dumps if rewards in (one.rewards, None)]
        numbers = [
            len(of_these),
            sum(one.exist for one in of_these),
            sum(one.by_tools for one in of_these),
            sum(one.by_one_start for one in of_these),
        ]
        cells = ["all" if rewards is None else str(rewards), *map(str, numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
