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

from verl_gdpo.algorithm.rows import ABSENT, BatchRows
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
        of_samples: list[Mapping[str, Sequence[float | None]]] = []
        for of_sample in criteria:
            # A function failed, or the sample is of a data source without this rubric.
            of_samples.append(of_sample if isinstance(of_sample, Mapping) else {})
        # A reward has at least one term, also where no sample has a criterion.
        J = max(1, *map(len, of_samples))
        values_NJ = np.full((len(of_samples), J), np.nan)
        weights_NJ = np.zeros((len(of_samples), J))
        for sample, of_sample in enumerate(of_samples):
            for j, name in enumerate(sorted(of_sample)):
                value, weight = of_sample[name]
                values_NJ[sample, j] = np.nan if value is None else value
                weights_NJ[sample, j] = weight
        if rubric_weights == "divided":
            total_N1 = np.abs(weights_NJ).sum(axis=1, keepdims=True)
            # Without criteria, all weights and their sum are 0.
            weights_NJ = weights_NJ / np.where(total_N1 > 0, total_N1, 1.0)
        return cls(values_NJ, weights_NJ)

    def with_weights_of_prompts(self, prompts: Sequence[str]) -> "Rubric":
        """Return it with the weights of a prompt also for its samples without criteria.

        Their values stay missing. Where rewards are summed, a missing value is 0, and the mean of
        the group is subtracted from it with the weight that the group has.

        Args:
            prompts: of each sample.
        """
        has_criteria_N = self.weights_NJ.any(axis=1)
        first_of: dict[str, int] = {}  # {prompt: its first sample with criteria}
        for sample in np.flatnonzero(has_criteria_N).tolist():
            first_of.setdefault(prompts[sample], sample)
        weights_NJ = self.weights_NJ.copy()
        for sample in np.flatnonzero(~has_criteria_N).tolist():
            if prompts[sample] in first_of:
                weights_NJ[sample] = weights_NJ[first_of[prompts[sample]]]
        return Rubric(self.values_NJ, weights_NJ)

    @property
    def score_N(self) -> Floats:
        """The weighted sum, to which a missing criterion adds nothing; NaN without any."""
        is_empty_N = np.isnan(self.values_NJ).all(axis=1)
        sum_N = np.nansum(self.values_NJ * self.weights_NJ, axis=1)
        return np.where(is_empty_N, np.nan, sum_N)


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
    if isinstance(weights, str):
        weights = json.loads(weights)
    has_names = isinstance(values, Mapping)
    if weights is None and has_names:
        weights = dict.fromkeys(values, 1.0)
    weight_of = {}
    for criterion, weight in dict(weights or {}).items():
        if weight is not None:
            weight_of[criterion] = weight
    if not has_names or not any(weight_of.values()) or set(values) != set(weight_of):
        raise ValueError(
            f"a rubric returned {values!r}, and the row has the weights {weight_of}; expected "
            "{criterion: number}, and a weight for each, of which one is not 0"
        )
    pairs = {}
    for criterion, weight in weight_of.items():
        what = f"criterion {criterion!r} "
        value = value_or_error(values[criterion], what)
        pairs[as_text(criterion)] = [value, value_or_error(weight, what)]
    return pairs


def check_rubrics(rows: BatchRows) -> None:
    """Raise RewardError if samples of a prompt have other criteria, or other weights of them.

    Also if a sample has a value of a rubric without criteria, of which nothing would be normalised.
    """
    for key, column in rows.columns.items():
        if key.startswith(RUBRIC_KEY):
            name = key.removeprefix(RUBRIC_KEY)
            _check_values(name, column, rows)
            _check_rubric(name, column, rows)


def _check_values(name: str, column: Sequence[Any], rows: BatchRows) -> None:
    """Raise RewardError for a value of this rubric without criteria.

    Args:
        column: {criterion: [value, weight]} of each row.
    """
    for row in rows.samples:
        value = rows.columns[name][row]
        if isinstance(column[row], Mapping) or value is None or value is ABSENT:
            continue
        raise RewardError(
            f"{rows.label(row)}: {name!r} is {value!r}, without the criteria that a rubric has for "
            "each sample. An agent loop that sets reward_score cannot return them: let it leave "
            "reward_score to the reward manager, or give its reward another name"
        )


def _check_rubric(name: str, column: Sequence[Any], rows: BatchRows) -> None:
    """Raise RewardError if samples of a prompt differ in the criteria of this rubric.

    Args:
        column: {criterion: [value, weight]} of each row.
    """
    first_of: dict[str, int] = {}  # {prompt: its first sample}
    weights_of: dict[str, dict[str, Any]] = {}  # {prompt: the weights of that sample}
    for row in rows.samples:
        if not isinstance(column[row], Mapping):
            continue  # a function failed, or the row is of another source
        weights = {}
        for criterion, (_value, weight) in column[row].items():
            weights[criterion] = weight
        uid = rows.keys[row].uid
        first = first_of.setdefault(uid, row)
        expected = weights_of.setdefault(uid, weights)
        if weights != expected:
            raise RewardError(
                f"{rows.label(row)}: rubric {name!r} has the weights {weights}, expected "
                f"{expected}, those of {rows.label(first)} of the same prompt. Return each "
                "criterion for every sample, None where it is missing"
            )
