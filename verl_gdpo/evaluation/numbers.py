"""Turns the scores of all questions into the numbers of a table, with 95 % intervals.

An interval is a percentile bootstrap over problems, drawn anew within each category: it says what
another choice of problems would change. It says nothing about training seeds, and it is too short
where all problems have one score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from verl_gdpo.evaluation.questions import ScoreColumn

Floats = npt.NDArray[np.float64]

DRAWS = 2000
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class QuestionScores:
    """The scores of one question.

    scores: of its dialogues, the mean over the samples.
    answers: {score: (sum over all answers, number of them)}.
    """

    category: str
    scores: Mapping[str, float]
    answers: Mapping[str, tuple[float, int]] = field(default_factory=dict)

    def share(self, column: ScoreColumn) -> tuple[float, float]:
        """Return what the problem adds to a column: to its sum, and to what this is divided by."""
        if column.over_answers:
            return self.answers.get(column.score, (0.0, 0))
        return (self.scores[column.score], 1) if column.score in self.scores else (0.0, 0)


@dataclass(frozen=True)
class Number:
    """A number of the table; `value` is None if a part of it was not run."""

    name: str
    value: float | None
    interval: tuple[float, float] | None
    questions: int
    parts: tuple["Number", ...] = ()


class Draws:
    """How often each problem counts: first once each, and then in `DRAWS` drawn sets of problems.

    A set has as many problems of each category as there are.
    """

    def __init__(self, problems: Sequence[QuestionScores], seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._of: dict[str, list[int]] = {}
        for k, problem in enumerate(problems):
            self._of.setdefault(problem.category, []).append(k)
        self._times = {name: self._drawn(len(places)) for name, places in self._of.items()}

    def _drawn(self, size: int) -> Floats:
        drawn = self._rng.multinomial(size, np.full(size, 1 / size), size=DRAWS)
        times: Floats = np.concatenate([np.ones((1, size)), drawn])
        return times

    def size(self, column: ScoreColumn) -> int:
        """Return how many questions a column is over."""
        return sum(
            len(self._of.get(name, ())) for name in {one.category for one in column.leaves()}
        )

    def values(self, column: ScoreColumn, problems: Sequence[QuestionScores]) -> Floats | None:
        """Return a column's value, and then that of each drawn set; None if it was not run."""
        if not column.parts:
            if column.category not in self._of:
                return None
            places = self._of[column.category]
            sums, counts = np.array([problems[k].share(column) for k in places]).T
            times = self._times[column.category]
            with np.errstate(invalid="ignore"):
                quotients: Floats = (times @ sums) / (times @ counts)
            return None if np.isnan(quotients[0]) else quotients
        of_parts = [self.values(part, problems) for part in column.parts]
        there = [value for value in of_parts if value is not None]
        if len(there) < len(of_parts):
            return None
        weights = [self.size(part) if column.by_questions else 1 for part in column.parts]
        mean: Floats = np.average(there, axis=0, weights=weights)
        return mean


def numbers(
    columns: Sequence[ScoreColumn],
    problems: Sequence[QuestionScores],
    less: Sequence[QuestionScores] | None = None,
    seed: int = 0,
) -> list[Number]:
    """Return the numbers of a table.

    Args:
        less: return what `problems` has more than these, which are the same ones in one order. Each
            drawn set of problems counts for both, so what makes a problem hard cancels out.
    """
    draws = Draws(problems, seed)

    def number(column: ScoreColumn) -> Number:
        values = draws.values(column, problems)
        if less is not None and values is not None:
            others = draws.values(column, less)
            values = None if others is None else values - others
        parts = tuple(number(part) for part in column.parts)
        if values is None:
            return Number(column.name, None, None, draws.size(column), parts)
        low, high = np.nanpercentile(values[1:], PERCENTILES)
        interval = (float(low), float(high))
        return Number(column.name, float(values[0]), interval, draws.size(column), parts)

    return [number(column) for column in columns]
