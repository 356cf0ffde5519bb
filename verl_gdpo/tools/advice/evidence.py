"""What the rewards of a run's first steps show: the numbers that `rules.yaml` is keyed on.

All of them come from sums over groups, so that groups drawn again say how sure they are. GRPO and
GDPO are those of the paper, with the run's rewards, weights and conditions, and GDPO without its
step over the batch, which only scales. Shape suffixes: B samples, K rewards, G groups, R times that
groups are drawn again.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.metrics import verl_grpo_settings
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.statistics import contributions, groups_with_signal, within_groups
from verl_gdpo.algorithm.zero import Bools, Floats, Ints, or_0
from verl_gdpo.run.dump_reader import Scorer, read_dump, reward_rows

METHODS = {"grpo": verl_grpo_settings(GdpoSettings()), "gdpo": GdpoSettings(batch_norm="none")}
FIRST_STEPS = 30  # the rules are keyed on what these show
DRAWN_AGAIN = 200
OUTLIERS = 0.01  # of the values other than the most frequent one, on either side

Numbers = Mapping[str, Floats]  # of one group or of all; by reward, or by pair of rewards


class Measured(NamedTuple):
    """What the rewards of a dump are like; `rules.yaml` says what each number is."""

    rewards: float
    agree: float
    opposite: float
    spread_ratio: float
    varies_ratio: float
    varies_alike: float
    correlation: float
    prompt_factor: float
    together: float


class StepRewards(NamedTuple):
    """The rewards of the samples of one step."""

    rewards: RewardMatrix
    group_B: Ints


def look(rewards: RewardMatrix, counted_B: Bools, group_ids: Any) -> StepRewards:
    """Return what is kept of one step.

    Args:
        rewards: of all rows, after their conditions.
        counted_B: True for the rows that are samples.
        group_ids: one id per row; samples of one prompt share an id.
    """
    values_BK, present_BK = rewards.values_BK[counted_B], rewards.present_BK[counted_B]
    group_B = np.unique(np.asarray(group_ids)[counted_B], return_inverse=True)[1]
    return StepRewards(RewardMatrix(rewards.weights, values_BK, present_BK), group_B)


class Evidence:
    """What the first steps show together. A step may lack rewards that others have."""

    def __init__(self, steps: Sequence[StepRewards]) -> None:
        steps = steps[:FIRST_STEPS]
        self.step_count = len(steps)
        self.weights: Mapping[str, float] = (
            pd.DataFrame([step.rewards.weights for step in steps]).mean().to_dict()
        )
        values = pd.concat([_columns(step.rewards) for step in steps])
        # copies: torch warns of what it may not write to
        self.present_BK: Bools = values.notna().to_numpy(copy=True)
        self.values_BK: Floats = values.fillna(0.0).to_numpy(copy=True)
        sizes = [int(step.group_B.max()) + 1 for step in steps]
        firsts = np.cumsum([0, *sizes[:-1]])
        of_steps = [step.group_B + first for step, first in zip(steps, firsts, strict=True)]
        self.group_B = np.concatenate(of_steps)
        self.step_G = np.repeat(np.arange(len(sizes)), sizes)

    @classmethod
    def of_dumps(
        cls, files: Sequence[Path], settings: GdpoSettings, scorer: Scorer | None = None
    ) -> "Evidence":
        """Read the first of these rollout dumps.

        Args:
            scorer: scores dumps that hold one summed score.

        Raises:
            ValueError: a dump cannot be read; see `read_dump`.
            RewardError: it lacks a reward that `settings` names.
        """
        steps = []
        for file in files[:FIRST_STEPS]:
            dump = read_dump(file, scorer, with_texts=False)
            rows = reward_rows(dump, int(file.stem))
            groups = [row["group"] for row in dump]
            steps.append(look(RewardMatrix.of(rows, settings), rows.counted_B, groups))
        return cls(steps)

    @property
    def weights_K(self) -> Floats:
        return np.array([*self.weights.values()])

    @cached_property
    def of_groups(self) -> Numbers:
        """The numbers of each group, along the first axis."""
        values_BK = self.values_BK * np.where(self.weights_K < 0, -1.0, 1.0)
        for k, there_B in enumerate(self.present_BK.T):
            values_BK[there_B, k] = without_outliers(values_BK[there_B, k])
        return {
            **self._spreads(values_BK),
            **self._met(values_BK),
            **self._updates(),
        }

    def _by_group(self, values: Any) -> Floats:
        """Sums over the samples of each group, of each column."""
        columns = np.asarray(values, float).reshape(len(self.group_B), -1).T
        sums = np.array([np.bincount(self.group_B, column) for column in columns], np.float64)
        by_group: Floats = sums.T.reshape(-1, *np.shape(values)[1:])
        return by_group

    def _spreads(self, values_BK: Floats) -> dict[str, Floats]:
        x_BK = np.zeros_like(values_BK)
        for k, there_B in enumerate(self.present_BK.T):
            x_BK[there_B, k] = within_groups(values_BK[there_B, k], self.group_B[there_B])
        freedom_GK = (self._by_group(self.present_BK) - 1).clip(min=0)
        std_GK = np.sqrt(self._by_group(x_BK**2) / freedom_GK.clip(min=1))
        varies_GK = std_GK > 0
        both_GKK = varies_GK[:, :, None] & varies_GK[:, None]
        log_GK = np.log(np.where(varies_GK, std_GK, 1.0))
        ratio_GKK = np.where(both_GKK, log_GK[:, :, None] - log_GK[:, None], 0.0)
        return {
            "freedom": freedom_GK,
            "has": (freedom_GK > 0).astype(float),
            "varies": varies_GK.astype(float),
            "ratios": both_GKK.astype(float),
            "ratio": ratio_GKK,
            "ratio_square": ratio_GKK**2,
            "square": self._by_group(x_BK[:, :, None] ** 2 * self.present_BK[:, None]),
            "product": self._by_group(x_BK[:, :, None] * x_BK[:, None]),
        }

    def _met(self, values_BK: Floats) -> dict[str, Floats]:
        """Samples with both rewards of a pair, with the first above its lowest, and with both."""
        there_BK = self.present_BK
        met_BK = there_BK & (values_BK > np.where(there_BK, values_BK, np.inf).min(0))
        return {
            "have": self._by_group(there_BK[:, :, None] & there_BK[:, None]),
            "met": self._by_group(met_BK[:, :, None] & there_BK[:, None]),
            "met_both": self._by_group(met_BK[:, :, None] & met_BK[:, None]),
        }

    def _updates(self) -> dict[str, Floats]:
        """Products of each reward's contribution with S, and of the S of both estimators."""
        matrix = RewardMatrix(self.weights, self.values_BK, self.present_BK)
        everything_B, S, products = np.ones(len(self.group_B), np.bool_), {}, {}
        for method, settings in METHODS.items():
            scalars = scalars_of(matrix, everything_B, self.group_B, settings)
            z_BK, S_B = scalars.z_BK.numpy(), scalars.S_B.numpy()
            c_BK = contributions(z_BK, S_B, self.values_BK, self.weights_K, self.group_B, settings)
            signal_G = groups_with_signal(S_B, c_BK, self.group_B)
            S[method] = or_0(S_B)[:, None]
            products[method] = self._by_group(c_BK * S[method] * signal_G[self.group_B, None])
            products[f"{method}_square"] = self._by_group(S[method] ** 2)
        return {**products, "grpo_gdpo": self._by_group(S["grpo"] * S["gdpo"])}

    @cached_property
    def numbers(self) -> Numbers:
        """Of all groups."""
        return {name: of_group.sum(0) for name, of_group in self.of_groups.items()}

    def drawn_again(self) -> Iterator[Numbers]:
        """Of all groups, each as often as chance draws it."""
        count_RG = np.random.default_rng(0).poisson(1.0, (DRAWN_AGAIN, len(self.step_G)))
        drawn = {name: np.tensordot(count_RG, of, 1) for name, of in self.of_groups.items()}
        for r in range(DRAWN_AGAIN):
            yield {name: of_R[r] for name, of_R in drawn.items()}

    def shares_K(self, method: str, numbers: Numbers | None = None) -> Floats:
        """Each reward's share of the update under "grpo" or "gdpo"; 0 without any signal."""
        numbers = numbers or self.numbers
        shares_K: Floats = numbers[method] / (numbers[f"{method}_square"] or 1.0)
        return shares_K

    def measured(self, numbers: Numbers | None = None) -> tuple[Measured, dict[str, str]]:
        """What the rules ask for, and {quantity: the rewards that it is of}."""
        quantities = _quantities(numbers or self.numbers, np.abs(self.weights_K))
        names = [*self.weights]
        of = {key: ", ".join(names[k] for k in places) for key, (_, places) in quantities.items()}
        return Measured(**{key: float(value) for key, (value, _) in quantities.items()}), of


def _columns(rewards: RewardMatrix) -> pd.DataFrame:
    """A column for each reward; NaN where it does not apply."""
    values_BK = np.where(rewards.present_BK, rewards.values_BK, np.nan)
    return pd.DataFrame(values_BK, columns=[*rewards.weights])


def without_outliers(values: Floats) -> Floats:
    """The values, less what is beyond all but one in a hundred of those that differ from most.

    A rare reward keeps its values, and a single value that is far off decides nothing.
    """
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) < 3:
        return values
    most = distinct[counts.argmax()]
    others = np.sort(values[values != most])
    cut = int(np.ceil(OUTLIERS * (len(others) - 1)))
    kept: Floats = values.clip(min(others[cut], most), max(others[-1 - cut], most))
    return kept


def _quantities(n: Numbers, weights_K: Floats) -> dict[str, tuple[float, Sequence[int]]]:
    """{quantity of `rules.yaml`: its value, and the rewards that it is of}; NaN for no rewards."""
    spread_K = weights_K * np.sqrt(np.diagonal(n["square"]) / n["freedom"].clip(min=1))
    used_K = spread_K > 0
    pair_KK = (n["have"] > 0) & used_K & used_K[:, None] & ~np.eye(len(used_K), dtype=np.bool_)
    squares = float(n["grpo_square"][0] * n["gdpo_square"][0])
    everything = range(len(used_K))
    quantities: dict[str, tuple[float, Sequence[int]]] = {
        "rewards": (max(pair_KK.any(0).sum(), used_K.any()), np.flatnonzero(used_K).tolist()),
        "agree": (n["grpo_gdpo"][0] / np.sqrt(squares) if squares else np.nan, everything),
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_KK = spread_K[:, None] / spread_K
        varies_KK = (n["varies"] / n["has"])[:, None] / (n["varies"] / n["has"])
        correlation_KK = n["product"] / np.sqrt(n["square"] * n["square"].T)
        log_KK = n["ratio"] / n["ratios"]
        variance_KK = (n["ratio_square"] / n["ratios"] - log_KK**2).clip(min=0)
        factor_KK = np.where(n["ratios"] > 1, np.exp(np.sqrt(variance_KK)), 1.0)
        together_KK = n["met_both"] * n["have"] / (n["met"] * n["met"].T)
    for key, values, sign in (
        ("opposite", correlation_KK, -1),
        ("spread_ratio", ratio_KK, 1),
        ("varies_alike", varies_KK, 1),
        ("correlation", correlation_KK, 1),
        ("prompt_factor", factor_KK, 1),
        ("together", together_KK, -1),
    ):
        is_there = pair_KK & np.isfinite(values)
        place = np.unravel_index(np.where(is_there, sign * values, -np.inf).argmax(), values.shape)
        quantities[key] = values[place] if is_there.any() else np.nan, [int(at) for at in place]
    large, small = quantities["spread_ratio"][1]
    is_known = np.isfinite(quantities["spread_ratio"][0])
    quantities["varies_ratio"] = varies_KK[large, small] if is_known else np.nan, (large, small)
    return quantities
