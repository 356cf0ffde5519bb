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

from verl_gdpo.algorithm.equation import GdpoScalars, Options, compute_gdpo_scalars
from verl_gdpo.algorithm.read_settings import line_of
from verl_gdpo.algorithm.rubrics import Rubric, Terms, check_rubrics
from verl_gdpo.algorithm.samples import (
    ABSENT,
    ROLLOUT_FACTS,
    RUBRIC_KEY,
    SCORER,
    BatchRows,
    RewardError,
    is_number,
    value_or_error,
)
from verl_gdpo.algorithm.settings import GdpoSettings, WeightedSum
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Floats, is_the_sum, with_slack


@dataclass(frozen=True)
class RewardMatrix:
    """The K rewards in use, after their conditions; 0 where absent or not counted."""

    weights: Mapping[str, float]
    values_BK: Floats  # of a rubric, the weighted sum of its criteria
    present_BK: npt.NDArray[np.bool_]
    criteria: Terms | None = None  # of a batch with a rubric

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
        counted_B = rows.counted_B
        counted = np.flatnonzero(counted_B).tolist()
        if not counted:
            raise RewardError("the batch holds no sample, only padding and what on_error=drop took")
        terms = _terms(rows, counted, settings)
        raw = {name: _column(name, rows, counted, settings) for name in terms.names}
        rubrics = {
            name: Rubric.of([rows.columns[key][row] for row in counted], settings.rubric_weights)
            for name in raw
            if (key := f"{RUBRIC_KEY}{name}") in rows.columns
        }
        raw |= {name: rubric.score_N for name, rubric in rubrics.items()}
        for name in raw.keys() & settings.bounds.keys():
            _check_bounds(name, raw[name], settings.bounds[name], rows, counted)
        for row in rows.own_scores.keys() & {*counted}:
            _value("reward_score", rows.own_scores[row], rows, row)
        if settings.rewards is None and (rows.own_scores or "score" in rows.columns):
            _check_scores(rows, counted, raw)
        parts = {name: [name] for name in terms}
        for name in rubrics.keys() & terms:
            criteria = {f"{name}/{j}": of for j, of in enumerate(rubrics[name].values_NJ.T)}
            raw, parts[name] = raw | criteria, [*criteria]
        split = WeightedSum({part: terms[name] for name in terms for part in parts[name]})
        if any(term.when for term in terms.values()):
            samples = zip(*map(_with_none, raw.values()), strict=True)
            gated = [split.gate(dict(zip(raw, sample, strict=True))) for sample in samples]
            raw = {name: _with_nan(values[name] for values in gated) for name in split}
        values_BM = np.full((len(rows), len(split)), np.nan)
        values_BM[counted_B] = np.stack([raw[name] for name in split], axis=1)
        present_BM, values_BM = ~np.isnan(values_BM), np.nan_to_num(values_BM)
        weights = terms.weights_at(rows.step)
        if not rubrics:
            return cls(weights, values_BM, present_BM)
        check_rubrics(rows)
        factor_BM, one_N1 = np.zeros_like(values_BM), np.ones((len(counted), 1))
        factors = [rubrics[k].weights_NJ if k in rubrics else one_N1 for k in terms]
        factor_BM[counted_B] = np.hstack(factors)
        weights_M = [weights[name] for name in terms for _ in parts[name]]
        starts_K = np.cumsum([0, *map(len, parts.values())])[:-1].tolist()
        of_all = Terms(values_BM, present_BM, factor_BM * weights_M, starts_K)
        present_BK = np.logical_or.reduceat(present_BM & (factor_BM != 0), starts_K, axis=1)
        score_BK = np.add.reduceat(values_BM * factor_BM, starts_K, axis=1)
        return cls(weights, score_BK, present_BK, of_all)

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


def _column(name: str, rows: BatchRows, counted: Sequence[int], settings: GdpoSettings) -> Floats:
    """Return one reward for the counted rows, NaN where it does not apply."""
    column = rows.columns[name]
    values = column if len(counted) == len(column) else [column[row] for row in counted]
    # fast path: almost always all values are floats; checking each one would dominate the run time
    if {*map(type, values)} == {float}:
        numbers = np.array(values)
        if np.isfinite(numbers).all():
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
