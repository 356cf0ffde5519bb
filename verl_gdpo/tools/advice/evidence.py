"""What the steps of a run show together.

Shape suffixes: T steps, K rewards.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from verl_gdpo.batch.advantages import Bools, Floats
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.run.dump_reader import read_dump, reward_rows
from verl_gdpo.run.scorer import Scorer
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.tools.advice.pairs import Pairs
from verl_gdpo.tools.advice.step import StepEvidence, Sums, look


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
