"""Looks up the rewards of a batch, checks them, and makes them a matrix.

Shape suffixes: B rows, K rewards, M terms; see `Terms`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
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
    as_float,
    is_number,
    value_or_error,
)
from verl_gdpo.algorithm.variants import Bounds
from verl_gdpo.algorithm.zero import Bools, Floats, is_the_sum, with_slack


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
        values: dict[str, Floats] = {}
        rubrics: dict[str, Rubric] = {}
        for name in names:
            values[name] = _column(name, rows, samples, settings)
            criteria = rows.columns.get(f"{RUBRIC_KEY}{name}")
            if criteria is not None:
                of_samples = [criteria[row] for row in samples]
                rubric = Rubric.of(of_samples, settings.rubric_weights)
                uids = [rows.keys[row].uid for row in samples]
                rubrics[name] = rubric.with_weights_of_prompts(uids)
                # In a replay, other settings may divide the weights than when the row was scored.
                values[name] = rubrics[name].score_N
            if name in settings.bounds:
                _check_bounds(name, values[name], settings.bounds[name], rows, samples)
        return cls(samples, values, rubrics)

    def terms_of(self, name: str) -> dict[str, Floats]:
        """Return {term: its N values} of a reward: itself, or each criterion of a rubric."""
        if name not in self.rubrics:
            return {name: self.values[name]}
        # "/" stands in no name of a reward, so that no other term has the name of a criterion.
        criteria_JN = self.rubrics[name].values_NJ.T
        return {f"{name}/{j}": criterion_N for j, criterion_N in enumerate(criteria_JN)}


@dataclass(frozen=True)
class RewardMatrix:
    """The K rewards in use, after their conditions; 0 where absent or not counted."""

    weights: Mapping[str, float]
    values_BK: Floats  # of a rubric, the weighted sum of its criteria
    present_BK: Bools
    criteria: Terms | None = None  # of a batch with a rubric
    raw: RawRewards | None = None  # None if it was not made of rows

    @cached_property
    def terms(self) -> Terms:
        """What GDPO normalises: these rewards, or with a rubric its criteria in its place."""
        if self.criteria is not None:
            return self.criteria
        weights_K = np.array(list(self.weights.values()))
        each = range(len(self.weights))  # without criteria, each reward is one term
        return Terms(self.values_BK, self.present_BK, weights_K, each)

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
        samples = rows.samples
        if not samples:
            raise RewardError("the batch holds no sample, only padding and what on_error=drop took")
        rewards = _rewards_in_use(rows, samples, settings)
        raw = RawRewards.of(rewards.names, rows, samples, settings)
        _check_scores(raw, rows, settings)
        if raw.rubrics:
            check_rubrics(rows)
        values_BM = _after_conditions(raw, rewards, len(rows))
        weights = rewards.weights_at(rows.step)
        if raw.rubrics:
            return cls._of_criteria(raw, weights, values_BM)
        return cls(weights, np.nan_to_num(values_BM), ~np.isnan(values_BM), raw=raw)

    @classmethod
    def _of_criteria(
        cls, raw: RawRewards, weights: Mapping[str, float], values_BM: Floats
    ) -> "RewardMatrix":
        """Put the weighted sum of a rubric in the place of its criteria, which are the terms.

        Args:
            values_BM: after conditions, NaN where missing.
        """
        starts_K: list[int] = []
        weights_M: list[float] = []
        factors: list[Floats] = []  # (N, criteria) of each reward: the weights of its criteria
        for name, weight in weights.items():
            if name in raw.rubrics:
                factor_NJ = raw.rubrics[name].weights_NJ
            else:
                factor_NJ = np.ones((len(raw.samples), 1))
            starts_K.append(len(weights_M))
            weights_M.extend([weight] * factor_NJ.shape[1])
            factors.append(factor_NJ)
        factor_BM = np.zeros_like(values_BM)
        factor_BM[raw.samples] = np.hstack(factors)
        present_BM = ~np.isnan(values_BM)
        number_BM = np.nan_to_num(values_BM)
        # A prompt with fewer criteria than another has factor 0 in the columns beyond its own.
        present_BK = np.logical_or.reduceat(present_BM & (factor_BM != 0), starts_K, axis=1)
        score_BK = np.add.reduceat(number_BM * factor_BM, starts_K, axis=1)
        criteria = Terms(number_BM, present_BM, factor_BM * weights_M, starts_K)
        return cls(weights, score_BK, present_BK, criteria, raw)

    def ranges(self, settings: GdpoSettings) -> dict[str, float]:
        """Return each reward's range, declared or of these rows; 0 for one that no row has."""
        ranges: dict[str, float] = {}
        for k, name in enumerate(self.weights):
            declared = settings.range_of(name)
            value_N = self.values_BK[self.present_BK[:, k], k]
            if declared is not None:
                ranges[name] = float(np.ptp(declared))
            elif len(value_N):
                ranges[name] = float(np.ptp(value_N))
            else:
                ranges[name] = 0.0
        return ranges

    def check_own_scores(self, rows: BatchRows) -> None:
        """Raise RewardError if an agent loop set another score than the weighted sum.

        verl's own estimators train on that score. GDPO does not.
        """
        sum_B = self.values_BK @ np.array(list(self.weights.values()))
        for row, score in rows.own_scores.items():
            if rows.counted_B[row] and not is_the_sum(score, sum_B[row]):
                raise RewardError(
                    f"{rows.label(row)}: the agent loop set reward_score={score:g}, on which any "
                    "estimator except gdpo trains, but the sum under algorithm.gdpo.rewards is "
                    f"{sum_B[row]:g}. Set that sum, or leave reward_score to the reward manager"
                )


def scalars_of(
    rewards: RewardMatrix,
    counted_B: Bools,
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
    method = {option.name: getattr(settings, option.name) for option in fields(Options)}
    return compute_gdpo_scalars(
        rewards.terms.values_BM,
        group_ids,
        token_count_B=token_count_B,
        weights=rewards.terms.weights,
        present_BK=rewards.terms.present_BM,
        valid_B=counted_B,
        combine=combine,
        **method,
    )


# --- which rewards are in use ---------------------------------------------------------------------


def rewards_among(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of the columns with numbers, or with only None if there are no numbers.

    Other columns, such as text or lists, are not rewards: a scorer may return them for verl to log.
    Neither are `ROLLOUT_FACTS`.
    """
    of_numbers = []
    of_none = []
    for name in _names(columns):
        # A column of thousands of values has few types, and one value of each tells.
        one_of_type = {type(value): value for value in columns[name]}
        if any(map(is_number, one_of_type.values())):
            of_numbers.append(name)
        elif one_of_type.keys() <= {type(None), type(ABSENT)}:
            of_none.append(name)
    return of_numbers or of_none


def terms_among(
    columns: Mapping[str, Sequence[Any]], settings: GdpoSettings, origin: str = SCORER
) -> WeightedSum:
    """Return the rewards in use: those that are configured, or else all columns with numbers.

    Raises:
        ValueError: see `GdpoSettings.terms_for`; `origin` says there who returned the columns.
    """
    if settings.rewards is not None:
        return settings.terms_for(columns, origin)
    return settings.terms_for(rewards_among(columns), origin)


def _names(info: Mapping[str, Any]) -> list[str]:
    return [name for name in info if name != "score" and name not in ROLLOUT_FACTS]


def _rewards_in_use(rows: BatchRows, samples: Sequence[int], settings: GdpoSettings) -> WeightedSum:
    """Return the rewards in use, after a look at the first sample of each data source."""
    first_of: dict[str, int] = {}
    for row in samples:
        first_of.setdefault(rows.sources[row], row)
    if settings.rewards is not None:
        return _configured_rewards(rows, list(first_of.values()), settings)
    return _returned_rewards(rows, samples, first_of, settings)


def _configured_rewards(
    rows: BatchRows, firsts: Sequence[int], settings: GdpoSettings
) -> WeightedSum:
    """Return the rewards that are configured, which each data source must have."""
    for row in firsts:
        rewards = _rewards_of_row(rows, row, rows.extra_info(row), settings)
    return rewards


def _returned_rewards(
    rows: BatchRows, samples: Sequence[int], first_of: Mapping[str, int], settings: GdpoSettings
) -> WeightedSum:
    """Return all rewards that were returned, with weight 1.

    Data sources may have different rewards, but all samples of one must have the same.
    """
    for row in first_of.values():
        # Such an agent loop would train its data source on no reward at all.
        if row in rows.own_scores and not _names(rows.extra_info(row)):
            _rewards_of_row(rows, row, [], settings)
    rewards = _rewards_of_row(rows, samples[0], rewards_among(rows.columns), settings)
    _check_same_names(rewards, rows, samples, first_of)
    return rewards


def _rewards_of_row(
    rows: BatchRows, row: int, names: Iterable[str], settings: GdpoSettings
) -> WeightedSum:
    """Return the rewards in use among these names; raise RewardError, which names the row."""
    try:
        return settings.terms_for(names, rows.origin_of(row))
    except ValueError as error:
        raise RewardError(f"{rows.label(row)}: {error}") from None


def _check_same_names(
    names: Iterable[str], rows: BatchRows, samples: Sequence[int], first_of: Mapping[str, int]
) -> None:
    """Raise RewardError if a sample lacks a reward that the first of its data source has."""
    # A name that was forgotten would else look like a reward that does not apply to the sample.
    for name in names:
        column = rows.columns[name]
        for row in samples:
            first = first_of[rows.sources[row]]
            if (column[row] is ABSENT) != (column[first] is ABSENT):
                raise RewardError(
                    f"{rows.label(row)} has the rewards {_names(rows.extra_info(row))}, but "
                    f"{rows.label(first)} of the same data source {rows.sources[row]!r} has "
                    f"{_names(rows.extra_info(first))}. Return the same names for every sample, "
                    "None where one does not apply, or name the rewards in algorithm.gdpo.rewards"
                )


# --- the values of a reward -----------------------------------------------------------------------


def _column(name: str, rows: BatchRows, samples: Sequence[int], settings: GdpoSettings) -> Floats:
    """Return one reward of the samples, checked, NaN where it does not apply."""
    column = rows.columns[name]
    values = [column[row] for row in samples]
    # fast path: almost always all values are floats; checking each one would dominate the run time
    if set(map(type, values)) == {float}:
        number_N = np.array(values)
        # This is False for NaN as well, which the loop below names with its row.
        if (np.abs(number_N) <= LARGEST).all():
            return number_N
    numbers: list[float | None] = []
    for row, value in zip(samples, values, strict=True):
        if value is ABSENT and settings.rewards is None:
            # The reward belongs to another data source; `_check_same_names` has seen to it.
            numbers.append(None)
        else:
            numbers.append(_checked(name, value, rows, row))
    return _with_nan(numbers)


def _checked(name: str, value: Any, rows: BatchRows, row: int) -> float | None:
    """Return a value as a float, or None; raise RewardError, which names the row, for others."""
    if value is ABSENT:
        # The names that the row does have tell a misspelt one from one that was forgotten.
        names = _names(rows.extra_info(row))
        raise RewardError(f"{rows.label(row)}: no reward {name!r}; {rows.origin_of(row)} {names}")
    try:
        return value_or_error(value, f"{rows.label(row)}: reward {name!r} ")
    except ValueError as error:
        raise RewardError(str(error)) from None


def _check_bounds(
    name: str, values: Floats, bounds: Bounds, rows: BatchRows, samples: Sequence[int]
) -> None:
    low, high, slack = with_slack(bounds)
    outside = np.flatnonzero((values < low - slack) | (values > high + slack))
    if len(outside):
        raise RewardError(
            f"{rows.label(samples[outside[0]])}: reward {name!r} is {values[outside[0]]}, outside "
            f"its bounds [{low:g}, {high:g}]; correct the scorer, or "
            f"algorithm.gdpo.rewards.{name}.bounds"
        )


def _after_conditions(raw: RawRewards, rewards: WeightedSum, B: int) -> Floats:
    """Return values_BM, each term after the condition of its reward, NaN where missing."""
    terms: dict[str, Floats] = {}
    setting_of = WeightedSum()  # {term: what is set for its reward}
    for name, setting in rewards.items():
        for term, value_N in raw.terms_of(name).items():
            terms[term] = value_N
            setting_of[term] = setting
    if any(setting.when is not None for setting in rewards.values()):
        terms = _gated(terms, setting_of, raw)
    values_BM = np.full((B, len(terms)), np.nan)
    values_BM[raw.samples] = np.stack(list(terms.values()), axis=1)
    return values_BM


def _gated(
    terms: Mapping[str, Floats], setting_of: WeightedSum, raw: RawRewards
) -> dict[str, Floats]:
    """Return the terms with what `WeightedSum.gate` says of each sample.

    The reward manager asks it too, so that what is trained on and verl's score follow one rule.
    """
    gated: dict[str, list[float | None]] = {term: [] for term in terms}
    # Conditions read raw rewards, of which a rubric is one, though its criteria are the terms.
    columns = {name: _with_none(value_N) for name, value_N in {**raw.values, **terms}.items()}
    for sample in range(len(raw.samples)):
        value_of = {name: column[sample] for name, column in columns.items()}
        for term, value in setting_of.gate(value_of).items():
            gated[term].append(value)
    return {term: _with_nan(values) for term, values in gated.items()}


def _with_nan(values: Sequence[float | None]) -> Floats:
    return np.array(values, dtype=np.float64)


def _with_none(value_N: Floats) -> list[float | None]:
    return [None if math.isnan(value) else value for value in value_N.tolist()]


# --- scores beside the rewards --------------------------------------------------------------------


def _check_scores(raw: RawRewards, rows: BatchRows, settings: GdpoSettings) -> None:
    """Raise RewardError for a score that cannot be used, or that contradicts the rewards."""
    for row in raw.samples:
        if row in rows.own_scores:
            _checked("reward_score", rows.own_scores[row], rows, row)
    # Where rewards are named, a score may well be the sum of others.
    has_scores = bool(rows.own_scores) or "score" in rows.columns
    if settings.rewards is None and has_scores:
        _refuse_other_sums(raw, rows)


def _refuse_other_sums(raw: RawRewards, rows: BatchRows) -> None:
    """Raise RewardError if a `score` is not the sum of all rewards, which replaces it."""
    score_N = np.full(len(raw.samples), np.nan)  # NaN where there is none
    for sample, row in enumerate(raw.samples):
        score = as_float(_score_of(rows, row))
        if score is not None:
            score_N[sample] = score
    sum_N = np.nansum(list(raw.values.values()), axis=0)
    differs_N = ~np.isnan(score_N) & ~is_the_sum(score_N, sum_N)
    if not differs_N.any():
        return
    first = int(differs_N.argmax())
    row = raw.samples[first]
    values = {name: float(value_N[first]) for name, value_N in raw.values.items()}
    message = not_the_sum(score_N[first], values, is_own=row in rows.own_scores)
    raise RewardError(f"{rows.label(row)}: {message}")


def _score_of(rows: BatchRows, row: int) -> Any:
    """Return the score that an agent loop set, or else what the scorer returned as `score`."""
    if row in rows.own_scores:
        return rows.own_scores[row]
    if "score" in rows.columns:
        return rows.columns["score"][row]
    return None


def not_the_sum(score: Any, values: Mapping[str, float | None], is_own: bool = False) -> str:
    """Return the message for a `score` that is not the sum of the rewards."""
    if is_own:
        origin = "the agent loop set reward_score="
    else:
        origin = "the scorer returned score="
    line = line_of("algorithm.gdpo.rewards", dict.fromkeys(values, 1.0))
    return (
        f"{origin}{score:g}, which is not the sum of {dict(values)}. Say which of them are rewards,"
        f" with their weights: {line}"
    )
