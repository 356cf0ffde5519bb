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

from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.values import RUBRIC_KEY, RewardError, as_text, value_or_error
from verl_gdpo.algorithm.zero import Bools, Floats


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
            for j, name in enumerate(sorted(of_row)):
                table[row, j] = of_row[name]
        values_NJ, weights_NJ = table[..., 0], table[..., 1]
        if rubric_weights == "divided":
            total_N1 = np.abs(weights_NJ).sum(axis=1, keepdims=True)
            weights_NJ = weights_NJ / np.where(total_N1 > 0, total_N1, 1.0)
        return cls(values_NJ, weights_NJ)

    @property
    def score_N(self) -> Floats:
        """The weighted sum, to which a missing criterion adds nothing; NaN without any."""
        is_empty_N = np.isnan(self.values_NJ).all(axis=1)
        return np.where(is_empty_N, np.nan, np.nansum(self.values_NJ * self.weights_NJ, axis=1))


class Terms(NamedTuple):
    """What GDPO normalises, after conditions: rewards, and in the place of a rubric its criteria.

    Shape suffixes: B rows, K rewards, M terms.
    """

    values_BM: Floats
    present_BM: Bools
    weights: Floats  # (M,), or with a rubric (B, M)
    starts_K: Sequence[int]  # the first term of each reward


def criteria_of(values: Any, weights: Any) -> dict[str, list[float | None]]:
    """Return {criterion: [value, weight]} of a sample, for verl's reward_extra_info.

    Args:
        values: {criterion: number or None} that a function returned.
        weights: {criterion: weight} of the row, or this as JSON. Parquet fills in None for criteria
            of other rows. With None, each weight is 1.

    Raises:
        ValueError: a value is no number, the names differ, or all weights are 0.
    """
    weights = json.loads(weights) if isinstance(weights, str) else weights
    has_names = isinstance(values, Mapping)
    weights = dict.fromkeys(values, 1.0) if has_names and weights is None else weights
    weights = {k: v for k, v in dict(weights or {}).items() if v is not None}
    if not has_names or not any(weights.values()) or {*values} != {*weights}:
        raise ValueError(
            f"a rubric returned {values!r}, and the row has the weights {weights}; expected "
            "{criterion: number}, and a weight for each, of which one is not 0"
        )
    return {
        as_text(k): [value_or_error(x, f"criterion {k!r} ") for x in (values[k], weight)]
        for k, weight in weights.items()
    }


def check_rubrics(rows: BatchRows) -> None:
    """Raise RewardError if samples of a prompt have other criteria, or other weights of them."""
    counted = np.flatnonzero(rows.counted_B).tolist()
    for name, column in rows.columns.items():
        if not name.startswith(RUBRIC_KEY):
            continue
        first_of: dict[str, tuple[int, Any]] = {}  # {prompt: its first row, and the weights there}
        for row in counted:
            criteria = column[row]
            if not isinstance(criteria, Mapping):
                continue  # a function failed, or the row is of another source
            weights = {criterion: pair[1] for criterion, pair in criteria.items()}
            first, expected = first_of.setdefault(rows.keys[row].uid, (row, weights))
            if weights != expected:
                raise RewardError(
                    f"{rows.label(row)}: rubric {name.removeprefix(RUBRIC_KEY)!r} has the weights "
                    f"{weights}, expected {expected}, those of {rows.label(first)} of the same "
                    "prompt. Return each criterion for every sample, None where it is missing"
                )
