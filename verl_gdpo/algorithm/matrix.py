"""Looks up the rewards of a batch, checks them, and makes them a matrix.

Shape suffixes: B rows, K rewards, M terms; see `Terms`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm.equation import GdpoScalars, compute_gdpo_scalars
from verl_gdpo.algorithm.read_settings import line_of
from verl_gdpo.algorithm.rows import ABSENT, BatchRows
from verl_gdpo.algorithm.rubrics import Rubric, Terms, check_rubrics
from verl_gdpo.algorithm.settings import GdpoSettings, Options, WeightedSum
from verl_gdpo.algorithm.values import (
    LARGEST,
    ROLLOUT_FACTS,
    RUBRIC_KEY,
    SCORER,
    RewardError,
    is_number,
    value_or_error,
)
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Floats, is_the_sum, with_slack


@dataclass(frozen=True)
class RawRewards:
    """The rewards of the N samples of a batch before their conditions, NaN where missing.

    samples: the row of each sample.
    values: {reward: its N values}, also of rewards that conditions alone read. The value of a
        rubric is the weighted sum of its criteria.
    rubrics: {reward: its criteria} of those that have some.
    """

    samples: Sequence[int]
    values: Mapping[str, Floats]
    rubrics: Mapping[str, Rubric]

    @classmethod
    def of(
        cls, names: Iterable[str], rows: BatchRows, samples: Sequence[int], settings: GdpoSettings
    ) -> "RawRewards":
        """Look up and check these rewards; see `RewardMatrix.of`."""
        values, rubrics = {}, {}
        for name in names:
            values[name] = _column(name, rows, samples, settings)
            key = f"{RUBRIC_KEY}{name}"
            if key in rows.columns:
                criteria = [rows.columns[key][row] for row in samples]
                rubrics[name] = Rubric.of(criteria, settings.rubric_weights)
                values[name] = rubrics[name].score_N
            if name in settings.bounds:
                _check_bounds(name, values[name], settings.bounds[name], rows, samples)
        return cls(samples, values, rubrics)

    def terms_of(self, name: str) -> dict[str, Floats]:
        """Return {term: its N values} of a reward: itself, or each criterion of a rubric."""
        if name not in self.rubrics:
            return {name: self.values[name]}
        criteria_JN = self.rubrics[name].values_NJ.T
        return {f"{name}/{j}": criterion_N for j, criterion_N in enumerate(criteria_JN)}


@dataclass(frozen=True)
class RewardMatrix:
    """The K rewards in use, after their conditions; 0 where absent or not counted."""

    weights: Mapping[str, float]
    values_BK: Floats  # of a rubric, the weighted sum of its criteria
    present_BK: npt.NDArray[np.bool_]
    criteria: Terms | None = None  # of a batch with a rubric
    raw: RawRewards | None = None  # None if it was not made of rows

    @cached_property
    def terms(self) -> Terms:
        """What GDPO normalises: these rewards, or with a rubric its criteria in its place."""
        weights_K, each = np.array([*self.weights.values()]), range(len(self.weights))
        return self.criteria or Terms(self.values_BK, self.present_BK, weights_K, each)

    @classmethod
    def of(cls, rows: BatchRows, settings: GdpoSettings) -> "RewardMatrix":
        """Look up and check the rewards that `settings` names, or all rewards if it names none.

        A value of None means that the reward does not apply to the sample. If `settings` names no
        rewards, a reward that only other data sources have also does not apply.

        Raises:
            RewardError: a row lacks a configured reward, or a value is not a finite number or is
                outside its bounds. If no rewards are configured, also: rows of one data source have
                different rewards, or a `score` is not the sum of all rewards.
        """
        samples = np.flatnonzero(rows.counted_B).tolist()
        if not samples:
            raise RewardError("the batch holds no sample, only padding and what on_error=drop took")
        rewards = _terms(rows, samples, settings)
        raw = RawRewards.of(rewards.names, rows, samples, settings)
        for row in rows.own_scores.keys() & {*samples}:
            _value("reward_score", rows.own_scores[row], rows, row)
        if settings.rewards is None and (rows.own_scores or "score" in rows.columns):
            _check_scores(rows, samples, raw.values)
        if raw.rubrics:
            check_rubrics(rows)
        gated = _gated(raw, rewards)
        values_BM = np.full((len(rows), len(gated)), np.nan)
        values_BM[samples] = np.stack(list(gated.values()), axis=1)
        present_BM, values_BM = ~np.isnan(values_BM), np.nan_to_num(values_BM)
        weights = rewards.weights_at(rows.step)
        if not raw.rubrics:
            return cls(weights, values_BM, present_BM, raw=raw)
        return cls._of_criteria(raw, weights, values_BM, present_BM)

    @classmethod
    def _of_criteria(
        cls,
        raw: RawRewards,
        weights: Mapping[str, float],
        values_BM: Floats,
        present_BM: npt.NDArray[np.bool_],
    ) -> "RewardMatrix":
        """Put the weighted sum of a rubric in the place of its criteria, which are the terms."""
        one_N1 = np.ones((len(raw.samples), 1))
        factors: list[Floats] = []
        starts_K: list[int] = []
        weights_M: list[float] = []
        for name, weight in weights.items():
            starts_K.append(len(weights_M))
            factors.append(raw.rubrics[name].weights_NJ if name in raw.rubrics else one_N1)
            weights_M += [weight] * len(raw.terms_of(name))
        factor_BM = np.zeros_like(values_BM)
        factor_BM[raw.samples] = np.hstack(factors)
        criteria = Terms(values_BM, present_BM, factor_BM * weights_M, starts_K)
        present_BK = np.logical_or.reduceat(present_BM & (factor_BM != 0), starts_K, axis=1)
        score_BK = np.add.reduceat(values_BM * factor_BM, starts_K, axis=1)
        return cls(weights, score_BK, present_BK, criteria, raw)

    def ranges(self, settings: GdpoSettings) -> dict[str, float]:
        """Return each reward's range, declared or of these rows; 0 for one that no row has."""
        columns = zip(self.weights, self.values_BK.T, self.present_BK.T, strict=True)
        values = {name: value_B[there_B] for name, value_B, there_B in columns}
        ends = {k: settings.range_of(k) or (of if len(of) else [0.0]) for k, of in values.items()}
        return {name: float(np.ptp(each)) for name, each in ends.items()}

    def check_own_scores(self, rows: BatchRows) -> None:
        """Raise RewardError if an agent loop set another score than the weighted sum.

        verl's own estimators train on that score. GDPO does not.
        """
        sum_B = self.values_BK @ np.array([*self.weights.values()])
        for row, score in rows.own_scores.items():
            if rows.counted_B[row] and not is_the_sum(score, sum_B[row]):
                raise RewardError(
                    f"{rows.label(row)}: the agent loop set reward_score={score:g}, on which any "
                    "estimator except gdpo trains, but the sum under algorithm.gdpo.rewards is "
                    f"{sum_B[row]:g}. Set that sum, or leave reward_score to the reward manager"
                )


def scalars_of(
    rewards: RewardMatrix,
    counted_B: npt.NDArray[np.bool_],
    group_ids: Any,
    settings: GdpoSettings,
    token_count_B: torch.Tensor | None = None,
) -> GdpoScalars:
    """Return z_BM, S and A of each of B rows under `settings`; see `compute_gdpo_scalars`.

    Args:
        counted_B: True for the rows that count; the other rows get 0.
        group_ids: B ids; samples of one prompt share an id.
        token_count_B: trained tokens of each row; only batch_norm="token" needs them.

    Raises:
        RewardError: `combine` needs the bounds of a reward, and they are not declared.
    """
    try:
        combine = settings.combine_for(rewards.weights)
    except ValueError as error:
        raise RewardError(str(error)) from None
    return compute_gdpo_scalars(
        rewards.terms.values_BM,
        group_ids,
        token_count_B=token_count_B,
        weights=rewards.terms.weights,
        present_BK=rewards.terms.present_BM,
        valid_B=counted_B,
        **{option.name: getattr(settings, option.name) for option in fields(Options)},
        combine=combine,
    )


def terms_among(
    columns: Mapping[str, Sequence[Any]], settings: GdpoSettings, origin: str = SCORER
) -> WeightedSum:
    """Return the rewards in use: those that are configured, or else all columns with numbers.

    Raises:
        ValueError: see `GdpoSettings.terms_for`; `origin` says there who returned the columns.
    """
    names = columns if settings.rewards is not None else rewards_among(columns)
    return settings.terms_for(names, origin)


def _terms(rows: BatchRows, counted: Sequence[int], settings: GdpoSettings) -> WeightedSum:
    """Return the rewards in use, after a look at the first row of each data source.

    If no rewards are configured, data sources may have different rewards, but all rows of one data
    source must have the same.
    """
    first_of: dict[str, int] = {}
    for row in counted:
        first_of.setdefault(rows.sources[row], row)
    row = counted[0]
    try:
        for row in first_of.values():
            if settings.rewards is not None:
                terms = settings.terms_for(rows.extra_info(row), rows.origin_of(row))
            elif row in rows.own_scores and not _names(rows.extra_info(row)):
                # such an agent loop would train its data source on no reward at all
                settings.terms_for([], rows.origin_of(row))
        if settings.rewards is not None:
            return terms
        row = counted[0]
        terms = terms_among(rows.columns, settings, rows.origin_of(row))
    except ValueError as error:
        raise RewardError(f"{rows.label(row)}: {error}") from None
    _check_same_names(terms, rows, counted, first_of)
    return terms


def rewards_among(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of the columns with numbers, or with only None if there are no numbers.

    Other columns, such as text or lists, are not rewards: a scorer may return them for verl to log.
    Neither are `ROLLOUT_FACTS`.
    """
    kinds = {name: {type(value): value for value in columns[name]} for name in _names(columns)}
    numbers = [name for name, kind in kinds.items() if any(map(is_number, kind.values()))]
    no_value = {type(None), type(ABSENT)}
    return numbers or [name for name, kind in kinds.items() if kind.keys() <= no_value]


def _check_same_names(
    names: Iterable[str], rows: BatchRows, counted: Sequence[int], first_of: Mapping[str, int]
) -> None:
    for name in names:
        is_absent = [value is ABSENT for value in rows.columns[name]]
        for row in counted if any(is_absent) else ():
            first = first_of[rows.sources[row]]
            if is_absent[row] != is_absent[first]:
                raise RewardError(
                    f"{rows.label(row)} has the rewards {_names(rows.extra_info(row))}, but "
                    f"{rows.label(first)} of the same data source {rows.sources[row]!r} has "
                    f"{_names(rows.extra_info(first))}. Return the same names for every sample, "
                    "None where one does not apply, or name the rewards in algorithm.gdpo.rewards"
                )


def _gated(raw: RawRewards, rewards: WeightedSum) -> dict[str, Floats]:
    """Return {term: its N values after the condition of its reward}, NaN where missing."""
    values: dict[str, Floats] = {}
    term_of = WeightedSum()  # {term: what is set for its reward}
    for name, setting in rewards.items():
        for term, value_N in raw.terms_of(name).items():
            values[term] = value_N
            term_of[term] = setting
    if all(setting.when is None for setting in rewards.values()):
        return values
    columns = {**raw.values, **values}  # conditions read the former
    gated = []
    for sample in zip(*map(_with_none, columns.values()), strict=True):
        gated.append(term_of.gate(dict(zip(columns, sample, strict=True))))
    return {term: _with_nan(of_sample[term] for of_sample in gated) for term in values}


def _column(name: str, rows: BatchRows, counted: Sequence[int], settings: GdpoSettings) -> Floats:
    """Return one reward for the counted rows, NaN where it does not apply."""
    column = rows.columns[name]
    values = column if len(counted) == len(column) else [column[row] for row in counted]
    # fast path: almost always all values are floats; checking each one would dominate the run time
    if {*map(type, values)} == {float}:
        numbers = np.array(values)
        if (np.abs(numbers) <= LARGEST).all():  # nor is one NaN
            return numbers
    others = settings.rewards is None  # then another data source may lack this reward
    return _with_nan(
        None if others and value is ABSENT else _value(name, value, rows, row)
        for row, value in zip(counted, values, strict=True)
    )


def _with_nan(values: Iterable[float | None]) -> Floats:
    return np.array([*values], dtype=np.float64)


def _with_none(values: Floats) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def _value(name: str, value: Any, rows: BatchRows, row: int) -> float | None:
    if value is ABSENT:
        origin, names = rows.origin_of(row), _names(rows.extra_info(row))
        raise RewardError(f"{rows.label(row)}: no reward {name!r}; {origin} {names}")
    try:
        return value_or_error(value, f"{rows.label(row)}: reward {name!r} ")
    except ValueError as error:
        raise RewardError(str(error)) from None


def _check_bounds(
    name: str, values: Floats, bounds: Bounds, rows: BatchRows, counted: Sequence[int]
) -> None:
    low, high, slack = with_slack(bounds)
    outside = np.flatnonzero((values < low - slack) | (values > high + slack))
    if len(outside):
        raise RewardError(
            f"{rows.label(counted[outside[0]])}: reward {name!r} is {values[outside[0]]}, outside "
            f"its bounds [{low:g}, {high:g}]; correct the scorer, or "
            f"algorithm.gdpo.rewards.{name}.bounds"
        )


def _check_scores(rows: BatchRows, counted: Sequence[int], raw: Mapping[str, Floats]) -> None:
    """Raise RewardError if a `score` is not the sum of all rewards, which replaces it."""
    column = rows.columns.get("score", [None] * len(rows))
    returned = [rows.own_scores.get(row, column[row]) for row in counted]
    scores = np.array([score if is_number(score) else np.nan for score in returned], float)
    sums = np.nansum([*raw.values()], axis=0)
    differs = ~np.isnan(scores) & ~is_the_sum(scores, sums)
    if differs.any():
        first = int(differs.argmax())
        values = {name: float(of_all[first]) for name, of_all in raw.items()}
        message = not_the_sum(scores[first], values, counted[first] in rows.own_scores)
        raise RewardError(f"{rows.label(counted[first])}: {message}")


def not_the_sum(score: Any, values: Mapping[str, float | None], is_own: bool = False) -> str:
    """Return the message for a `score` that is not the sum of the rewards."""
    origin = "the agent loop set reward_score=" if is_own else "the scorer returned score="
    line = line_of("algorithm.gdpo.rewards", dict.fromkeys(values, 1.0))
    return (
        f"{origin}{score:g}, which is not the sum of {dict(values)}. Say which of them are rewards,"
        f" with their weights: {line}"
    )


def _names(info: Mapping[str, Any]) -> list[str]:
    return [name for name in info if name != "score" and name not in ROLLOUT_FACTS]
