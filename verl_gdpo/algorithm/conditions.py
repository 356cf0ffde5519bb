"""Finds rewards for which it is better to fail their condition than to meet it.

A sample that does not meet the condition of a reward gets the value of `otherwise`, by default 0.
To a penalty from -3.5 to 0 this is the best value, so that a wrong answer would be better than a
right one that is too long. The same holds for a positive reward with a negative weight. Such a
default is refused. If the user has written `otherwise`, it is taken, with one warning.

Shape suffixes: N samples of a batch; V values of one reward.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from verl_gdpo.algorithm.matrix import RawRewards
from verl_gdpo.algorithm.read_settings import REWARDS, line_of
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings, RewardTerm
from verl_gdpo.algorithm.zero import Floats, is_gain


@dataclass(frozen=True)
class PaidFailure:
    """A reward for which it is better to fail its condition than to meet it.

    is_default: whether the user has written no `otherwise`, so that nobody has chosen the value.
    message: says what is better than what, and the lines to choose from.
    """

    reward: str
    is_default: bool
    message: str


class _Reachable(NamedTuple):
    """Values that samples which meet the condition can have."""

    values_V: Floats  # NaN where missing
    factors_V: Floats  # of a rubric, the weight of the criterion; else 1
    is_summed: bool  # see `paid_by_bounds`


def paid_by_bounds(settings: GdpoSettings, *, is_summed: bool) -> list[PaidFailure]:
    """Return the rewards of which the bounds, declared or configured, tell it.

    Args:
        is_summed: whether the rewards are added before they are normalised, as GRPO does. Then a
            missing reward counts as 0.
    """
    found = []
    for name, term in settings.terms.items():
        if term.when is None or name not in settings.bounds:
            continue
        low, high = settings.bounds[name]
        reachable = _Reachable(np.array([low, high]), np.ones(2), is_summed)
        worst = _worst_place(term, reachable)
        if worst is not None:
            value = f"{reachable.values_V[worst]:g}, which is within its bounds [{low:g}, {high:g}]"
            found.append(_paid(name, term, reachable, value))
    return found


def paid_in_batch(
    raw: RawRewards, rows: BatchRows, settings: GdpoSettings, *, is_summed: bool
) -> list[PaidFailure]:
    """Return the rewards of which the values of a batch tell it, also those of failing samples.

    Of a rubric, each criterion is looked at, because each is normalised by itself.

    Args:
        raw: the rewards of the batch before their conditions.
        is_summed: see `paid_by_bounds`.
    """
    found = []
    for name, term in settings.terms.items():
        if term.when is None:
            continue
        reachable = _reached(name, raw, is_summed)
        worst = _worst_place(term, reachable)
        if worst is not None:
            values_of_sample = len(reachable.values_V) // len(raw.samples)
            label = rows.label(raw.samples[worst // values_of_sample])
            whose = f"a criterion of {label}" if name in raw.rubrics else label
            value = f"{reachable.values_V[worst]:g}, which {whose} has"
            found.append(_paid(name, term, reachable, value))
    return found


def _reached(name: str, raw: RawRewards, is_summed: bool) -> _Reachable:
    """Return the values of a reward in a batch, sample by sample; of a rubric, each criterion's."""
    if name in raw.rubrics:
        rubric = raw.rubrics[name]
        return _Reachable(rubric.values_NJ.ravel(), rubric.weights_NJ.ravel(), is_summed)
    return _Reachable(raw.values[name], np.ones(len(raw.samples)), is_summed)


def _signs(term: RewardTerm) -> set[float]:
    """Return the signs of the weight, of which a schedule may have two."""
    return {float(np.sign(weight)) for weight in term.weights.values() if weight != 0}


def _value_of_failing(term: RewardTerm, is_summed: bool) -> float | None:
    """Return what a failing sample gets; None if it is left out of the group's statistics."""
    # A sum has no place for a missing reward: it adds 0 there.
    if term.fallback is None and is_summed:
        return 0.0
    return term.fallback


def _worst_place(term: RewardTerm, reachable: _Reachable) -> int | None:
    """Return the place of the value that is furthest below that of failing; None without one."""
    signs = _signs(term)
    failing = _value_of_failing(term, reachable.is_summed)
    there_V = ~np.isnan(reachable.values_V)
    if failing is None or not signs or not there_V.any():
        return None
    more_V = reachable.factors_V * (failing - reachable.values_V)
    # With a schedule of both signs, failing must not pay under either.
    gain_V = np.max([sign * more_V for sign in signs], axis=0)
    gain_V[~there_V] = -np.inf
    worst = int(gain_V.argmax())
    # Rounding grows with the numbers that are subtracted.
    largest = np.abs(reachable.factors_V * reachable.values_V)[there_V].max()
    if is_gain(gain_V[worst], max(largest, abs(failing))):
        return worst
    return None


def _lowest(term: RewardTerm, reachable: _Reachable) -> float | None:
    """Return the value that is worst for all; None where weights of both signs leave none."""
    there_V = ~np.isnan(reachable.values_V) & (reachable.factors_V != 0)
    values_V = reachable.values_V[there_V]
    # A criterion of a rubric with a weight below 0 turns the direction once more.
    signs_of_factors = set(np.sign(reachable.factors_V[there_V]).tolist())
    directions = set()
    for sign in _signs(term):
        for sign_of_factor in signs_of_factors:
            directions.add(sign * sign_of_factor)
    if directions == {1.0}:
        return float(values_V.min())
    if directions == {-1.0}:
        return float(values_V.max())
    return None


def _paid(name: str, term: RewardTerm, reachable: _Reachable, value: str) -> PaidFailure:
    """Return the finding, with its message.

    Args:
        value: of a sample that meets the condition; it is worse than that of failing.
    """
    assert term.when is not None
    failing = _value_of_failing(term, reachable.is_summed)
    weight = f" with weight={term.weight}" if _signs(term) != {1.0} else ""
    message = (
        f"{REWARDS}.{name}: a sample without {term.when.reward!r} of at least "
        f"{term.when.at_least:g} gets {failing:g} ({_written(term)}){weight}, which is better than "
        f"{value}, so that it is better to fail the condition than to meet it. "
        f"Choose: {'; or '.join(_choices(name, term, reachable))}."
    )
    if term.otherwise is None:
        message += f" To keep 0, write it: {line_of(REWARDS, {name: {'otherwise': 'zero'}})}"
    return PaidFailure(name, is_default=term.otherwise is None, message=message)


def _written(term: RewardTerm) -> str:
    """Return where the value of failing comes from, for the message."""
    if term.otherwise is None:
        return "the default"
    if term.otherwise == "missing":
        return "otherwise=missing, as rewards are summed first"
    return f"otherwise={term.otherwise}"


def _choices(name: str, term: RewardTerm, reachable: _Reachable) -> list[str]:
    """Return what the user can write instead."""
    choices = []
    # Where rewards are summed first, a missing one counts as 0, which mends nothing.
    if not reachable.is_summed:
        line = line_of(REWARDS, {name: {"otherwise": "missing"}})
        choices.append(f"to compare only samples that meet the condition, {line}")
    lowest = _lowest(term, reachable)
    if lowest is not None:
        line = line_of(REWARDS, {name: {"otherwise": lowest}})
        choices.append(f"to give the others the lowest value, {line}")
    if not choices:
        choices.append(
            "return a reward that is better the higher it is, and give it a weight above 0"
        )
    return choices
