"""What the rewards of a run's steps show: sums over their samples, from which the advice follows.

GRPO and GDPO are those of the paper, with the run's rewards, weights and conditions, and GDPO
without its step over the batch, which only scales. Shape suffixes: T steps, B samples, K rewards,
G groups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.advantage.zero import or_0
from verl_gdpo.batch.advantages import (
    Bools,
    Floats,
    Ints,
    advantages_without_eps,
    contributions,
    covariances,
    groups_with_signal,
    scalars_of,
    within_groups,
)
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import verl_grpo_settings
from verl_gdpo.run.dump_reader import read_dump, reward_rows
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.settings.algorithm import GdpoSettings

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
class Pairs:
    """Numbers of pairs of samples of a group that differ in a reward with a weight."""

    different: int = 0
    opposed: int = 0  # one reward prefers one of the two, another reward the other
    tied_grpo: int = 0
    tied_gdpo: int = 0
    turned: int = 0  # GRPO prefers one of the two, and GDPO the other

    def __add__(self, other: "Pairs") -> "Pairs":
        return Pairs(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


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


def _within(values_BK: Floats, present_BK: Bools, group_B: Ints) -> dict[str, Floats]:
    K = values_BK.shape[1]
    of_one = ("within_K", "within_freedom_K", "between_K", "between_freedom_K")
    found = {name: np.zeros(K) for name in of_one}
    found |= {name: np.zeros((K, K)) for name in ("product_KK", "square_KK")}
    for j, k in product(range(K), repeat=2):
        both_B = present_BK[:, j] & present_BK[:, k]
        if not both_B.any():
            continue
        x_B, y_B = (within_groups(values_BK[both_B, n], group_B[both_B]) for n in (j, k))
        found["product_KK"][j, k], found["square_KK"][j, k] = x_B @ y_B, x_B @ x_B
        if j == k:
            groups, values = len(np.unique(group_B[both_B])), values_BK[both_B, k]
            whole = ((values - values.mean()) ** 2).sum()
            of_k = (x_B @ x_B, len(x_B) - groups, whole - x_B @ x_B, groups - 1)
            for name, value in zip(of_one, of_k, strict=True):
                found[name][k] = value
    return found


def _std_of_groups(values_BK: Floats, present_BK: Bools, group_B: Ints) -> Floats:
    """Return the std of each reward in each group (ddof 1), 0 with fewer than two values."""
    columns = []
    for value_B, there_B in zip(values_BK.T, present_BK.T, strict=True):
        group, size = group_B[there_B], np.bincount(group_B[there_B], minlength=group_B.max() + 1)
        centred = within_groups(value_B[there_B], group)
        square_G = np.bincount(group, centred**2, minlength=len(size))
        columns.append(np.sqrt(square_G / np.maximum(size - 1, 1)))
    return np.stack(columns, axis=1)


def _ratios(std_GK: Floats) -> dict[str, Floats]:
    K = std_GK.shape[1]
    square_KK, freedom_KK = np.zeros((K, K)), np.zeros((K, K))
    for j, k in permutations(range(K), 2):
        both_G = (std_GK[:, j] > 0) & (std_GK[:, k] > 0)
        if both_G.sum() > 1:
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


def count_pairs(
    worth_BK: Floats, present_BK: Bools, grpo_B: Floats, gdpo_B: Floats, group_B: Ints
) -> Pairs:
    """Return the pairs of a step.

    Args:
        worth_BK: each reward times its weight; a reward that a sample of a pair lacks says nothing,
            and makes the two different.
        grpo_B, gdpo_B: advantages, rounded so that equal numbers are equal advantages.
    """
    order = np.argsort(group_B, kind="stable")
    group_B, worth_BK, present_BK = group_B[order], worth_BK[order], present_BK[order]
    grpo_B, gdpo_B = grpo_B[order], gdpo_B[order]
    counts = Pairs()
    for apart in range(1, int(np.bincount(group_B).max())):  # two rows of the sorted batch
        same = group_B[apart:] == group_B[:-apart]
        both = present_BK[apart:] & present_BK[:-apart]
        more = np.where(both, worth_BK[apart:] - worth_BK[:-apart], 0.0)[same]
        lacking = (present_BK[apart:] != present_BK[:-apart])[same].any(axis=1)
        different = (more != 0).any(axis=1) | lacking
        grpo, gdpo = ((A_B[apart:] - A_B[:-apart])[same] for A_B in (grpo_B, gdpo_B))
        counts += Pairs(
            different=int(different.sum()),
            opposed=int(((more > 0).any(axis=1) & (more < 0).any(axis=1)).sum()),
            tied_grpo=int((different & (grpo == 0)).sum()),
            tied_gdpo=int((different & (gdpo == 0)).sum()),
            turned=int((grpo * gdpo < 0).sum()),
        )
    return counts


class Evidence:
    """What all steps together show. A step may lack rewards that others have.

    Args:
        settings: of the run; its bounds are the ranges of rewards, in place of what was seen.
    """

    def __init__(self, steps: Sequence[StepEvidence], settings: GdpoSettings) -> None:
        self.steps = steps
        self.names = list(dict.fromkeys(name for step in steps for name in step.names))
        self.weights_K = np.zeros(len(self.names))  # the last ones that are known
        for step in steps:
            self.weights_K[self._places(step)] = step.weights_K
        self.mean_TK = self._over_steps(lambda step: step.mean_K)
        low_K = np.fmin.reduce(self._over_steps(lambda step: step.low_K))
        high_K = np.fmax.reduce(self._over_steps(lambda step: step.high_K))
        seen = dict(zip(self.names, zip(low_K, high_K, strict=True), strict=True))
        ends = [settings.range_of(name) or seen[name] for name in self.names]
        self.range_K = np.array([high - low for low, high in ends])
        self.pairs = sum((step.pairs for step in steps), Pairs())
        self.sums = Sums(**{field.name: self._added(field.name) for field in fields(Sums)})

    @classmethod
    def of_dumps(
        cls, files: Sequence[Path], settings: GdpoSettings, scorer: Scorer | None = None
    ) -> "Evidence":
        """Read rollout dumps.

        Args:
            scorer: scores dumps that hold one summed score.

        Raises:
            ValueError: a dump cannot be read; see `read_dump`.
            RewardError: it lacks a reward that `settings` names.
        """
        steps = []
        for file in files:
            dump = read_dump(file, scorer, with_texts=False)
            rows = reward_rows(dump, int(file.stem))
            groups = [row["group"] for row in dump]
            steps.append(look(RewardMatrix.of(rows, settings), rows.counted_B, groups))
        return cls(steps, settings)

    def _over_steps(self, read: Callable[[StepEvidence], Floats]) -> Floats:
        """Return an array (T, K); NaN where a step lacks the reward."""
        found = np.full((len(self.steps), len(self.names)), np.nan)
        for t, step in enumerate(self.steps):
            found[t, self._places(step)] = read(step)
        return found

    def _places(self, step: StepEvidence) -> list[int]:
        return [self.names.index(name) for name in step.names]

    def _added(self, name: str) -> Floats:
        first = getattr(self.steps[0].sums, name)
        total = np.zeros((len(self.names),) * first.ndim)
        for step in self.steps:
            places = self._places(step)
            total[np.ix_(*[places] * first.ndim) if first.ndim else ()] += getattr(step.sums, name)
        return total

    @property
    def spread_K(self) -> Floats:
        """Standard deviation within groups, pooled over all groups (ddof 1)."""
        spread_K: Floats = np.sqrt(self.sums.within_K / self.sums.within_freedom_K.clip(min=1))
        return spread_K

    @property
    def used_K(self) -> Bools:
        """True for the rewards that have a weight and differ within some group."""
        used_K: Bools = (self.sums.within_K > 0) & (self.weights_K != 0)
        return used_K

    def shares_K(self, method: str) -> Floats:
        """Each reward's share of the update under "grpo" or "gdpo"; 0 without any signal."""
        total = getattr(self.sums, method)
        shares_K: Floats = getattr(self.sums, f"{method}_K") / (total or 1.0)
        return shares_K

    def correlation(self, j: int, k: int) -> float:
        """The correlation of two rewards within groups; 0 if one of them is constant."""
        squares = self.sums.square_KK[j, k] * self.sums.square_KK[k, j]
        return float(self.sums.product_KK[j, k] / np.sqrt(squares)) if squares > 0 else 0.0

    def with_gdpo(self, method: str) -> float | None:
        """The correlation of the advantages of "grpo" or "rescaled" with those of GDPO."""
        squares = getattr(self.sums, method) * self.sums.gdpo
        product = getattr(self.sums, f"{method}_and_gdpo")
        return float(product / np.sqrt(squares)) if squares > 0 else None

    def factor_by_prompt(self, j: int, k: int) -> float:
        """How much the scale of one reward against the other differs between prompts; 1 is not."""
        freedom = self.sums.log_ratio_freedom_KK[j, k]
        return float(np.exp(np.sqrt(self.sums.log_ratio_KK[j, k] / freedom))) if freedom else 1.0
