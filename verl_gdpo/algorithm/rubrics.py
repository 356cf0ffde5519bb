"""Rubrics: rewards whose criteria, and their weights, differ from prompt to prompt.

A rubric is one reward for conditions, metrics and verl. GDPO normalises each of its criteria within
the group, and their weighted sum takes the place of the reward's z. Criterion j of a sample, in the
order of the names, is column j: other prompts have another criterion there, which no statistic of a
group mixes. Shape suffixes: N samples, J criteria of the sample with the most.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_gdpo.algorithm.samples import BatchRows, RewardError, as_json, as_text, value_or_error
from verl_gdpo.algorithm.samples import group_of as prompt_of
from verl_gdpo.algorithm.zero import Bools, Floats

# verl's reward_extra_info has it before a reward's name: {criterion: [value or None, weight]}
RUBRIC_KEY = "gdpo_rubric_"
Criteria = Mapping[str, Sequence[Any]]


class Rubric(NamedTuple):
    """The criteria of one reward; weight 0 beyond those of a sample."""

    values_NJ: Floats  # NaN where missing
    weights_NJ: Floats

    @classmethod
    def of(cls, criteria: Sequence[Any], rubric_weights: str) -> "Rubric":
        """Return the rubric of samples, of which those without criteria have no mapping.

        Args:
            rubric_weights: the setting; weights are divided by the sum of their absolute values.
        """
        criteria = [each if isinstance(each, Mapping) else {} for each in criteria]
        table = np.full((len(criteria), max(1, *map(len, criteria)), 2), [np.nan, 0.0])
        for row, of_row in enumerate(criteria):
            table[row, : len(of_row)] = [of_row[name] for name in sorted(of_row)] or [[]]
        values_NJ, weights_NJ = table[..., 0], table[..., 1]
        if rubric_weights == "divided":
            total_N = np.abs(weights_NJ).sum(axis=1, keepdims=True)
            weights_NJ = weights_NJ / np.where(total_N > 0, total_N, 1.0)
        return cls(values_NJ, weights_NJ)

    @property
    def score_N(self) -> Floats:
        """The weighted sum, to which a missing criterion adds nothing; NaN without any."""
        is_empty_N = np.isnan(self.values_NJ).all(axis=1)
        return np.where(is_empty_N, np.nan, np.nansum(self.values_NJ * self.weights_NJ, axis=1))

    def parts(self, name: str) -> list[str]:
        """Return a name for each criterion, which no reward can have."""
        return [f"{name}/{j}" for j in range(self.weights_NJ.shape[1])]


class Terms(NamedTuple):
    """What GDPO normalises, after conditions: rewards, and in the place of a rubric its criteria.

    Shape suffixes: B rows, K rewards, M terms.
    """

    values_BM: Floats
    present_BM: Bools
    weights: Floats  # (M,), or with a rubric (B, M)
    starts_K: Sequence[int]  # the first term of each reward
    rubrics: Sequence[str] = ()  # names

    def fold(self, values_BM: Floats | Bools) -> Floats:
        """Return the sum over the terms of each reward, (B, K)."""
        return np.add.reduceat(values_BM, self.starts_K, axis=1, dtype=np.float64)

    def of_rows(self, rows: Any) -> "Terms":
        weights = self.weights[rows] if self.weights.ndim == 2 else self.weights
        return Terms(self.values_BM[rows], self.present_BM[rows], weights, *self[3:])


def criteria_of(values: Any, weights: Any = None) -> dict[str, list[float | None]]:
    """Return the criteria of a sample for verl's reward_extra_info.

    Args:
        values: {criterion: number or None} that a function returned.
        weights: {criterion: weight} of the row, or this as JSON. Parquet fills in None for criteria
            of other rows. With None, each weight is 1.

    Raises:
        ValueError: a value is no number, the names differ, or all weights are 0.
    """
    if not isinstance(values, Mapping) or not values:
        raise ValueError(f"a rubric returned {values!r:.200}; expected {{criterion: number}}")
    weights = json.loads(weights) if isinstance(weights, str) else weights
    weights = dict.fromkeys(values, 1.0) if weights is None else weights
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    if weights.keys() != values.keys() or not any(weights.values()):
        raise ValueError(
            f"the rubric has the criteria {sorted(values)}, and the row the weights {weights}; "
            "expected a weight for each, and one that is not 0"
        )
    return {
        as_text(name): [
            value_or_error(value, f"criterion {name!r} "),
            value_or_error(weights[name], f"the weight of criterion {name!r} "),
        ]
        for name, value in values.items()
    }


def as_dumped(name: str, value: Any) -> Any:
    """Return a value of reward_extra_info for JSON; see `as_json`. A rubric is never cut."""
    return value if name.startswith(RUBRIC_KEY) else as_json(value)


def check_rubrics(rows: BatchRows) -> None:
    """Raise RewardError if samples of a prompt have other criteria, or other weights of them."""
    for name in [name for name in rows.columns if name.startswith(RUBRIC_KEY)]:
        first_of: dict[str, tuple[int, dict[str, Any]]] = {}
        for row in np.flatnonzero(rows.counted_B).tolist():
            if not isinstance(criteria := rows.columns[name][row], Mapping):
                continue  # its function failed, or it has another data source
            weights = {criterion: pair[1] for criterion, pair in criteria.items()}
            first, expected = first_of.setdefault(prompt_of(rows.label(row)), (row, weights))
            if weights != expected:
                raise RewardError(
                    f"{rows.label(row)}: rubric {name.removeprefix(RUBRIC_KEY)!r} has the weights "
                    f"{weights}, expected those of {rows.label(first)}, of the same prompt: "
                    f"{expected}. Return each criterion for every sample, None where it is missing"
                )
