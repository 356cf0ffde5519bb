"""Turns the scores of all questions into the numbers of a table, with 95 % intervals.

An interval is a percentile bootstrap over problems, drawn anew within each category: it says what
another choice of problems would change. It says nothing about training seeds, and it is too short
where all problems have one score.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from verl_gdpo.evaluation import ScoreColumn

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
    """A number of the table, with an indented name if it is part of one above.

    `value` is None if a part of it was not run.
    """

    name: str
    value: float | None
    interval: tuple[float, float] | None
    questions: int


class Draws:
    """How often each problem counts: first once each, and then in `DRAWS` drawn sets of problems.

    A set has as many problems of each category as there are.

    places: those of the problems of each category.
    """

    def __init__(self, problems: Sequence[QuestionScores]) -> None:
        rng = np.random.default_rng(0)
        self.places: dict[str, list[int]] = {}
        for k, problem in enumerate(problems):
            self.places.setdefault(problem.category, []).append(k)
        self._times: dict[str, Floats] = {}
        for category, places in self.places.items():
            size = len(places)
            drawn = rng.multinomial(size, np.full(size, 1 / size), size=DRAWS)
            self._times[category] = np.concatenate([np.ones((1, size)), drawn])

    def size(self, column: ScoreColumn) -> int:
        """Return how many questions a column is over."""
        categories = {leaf.category for _, leaf in flat([column])}
        return sum(len(self.places.get(category, ())) for category in categories)

    def values(self, column: ScoreColumn, problems: Sequence[QuestionScores]) -> Floats:
        """Return a column's value, and then that of each drawn set; NaN if it was not run."""
        if column.parts:
            parts = [self.values(part, problems) for part in column.parts]
            # a part without a question is NaN, whatever its weight
            sizes = [max(1, self.size(part)) if column.by_questions else 1 for part in column.parts]
            mean: Floats = np.average(parts, axis=0, weights=sizes)
            return mean
        if column.category not in self.places:
            return np.full(DRAWS + 1, np.nan)
        shares = [problems[k].share(column) for k in self.places[column.category]]
        sums, counts = np.array(shares).T
        times = self._times[column.category]
        with np.errstate(invalid="ignore"):
            quotients: Floats = (times @ sums) / (times @ counts)
        return quotients


def flat(columns: Sequence[ScoreColumn], depth: int = 0) -> Iterator[tuple[int, ScoreColumn]]:
    """Yield (depth, column) for each column, and for its parts behind it."""
    for column in columns:
        yield depth, column
        yield from flat(column.parts, depth + 1)


def numbers(
    columns_of: Callable[[Sequence[str]], Sequence[ScoreColumn]],
    problems: Sequence[QuestionScores],
    less: Sequence[QuestionScores] | None = None,
) -> list[Number]:
    """Return the numbers of a table.

    Args:
        columns_of: see `Benchmark.columns`.
        less: return what `problems` has more than these, which are the same ones in one order. Each
            drawn set of problems counts for both, so what makes a problem hard cancels out.
    """
    draws, made = Draws(problems), []
    for depth, column in flat(columns_of([*draws.places])):
        values = draws.values(column, problems)
        if less is not None:
            values = values - draws.values(column, less)
        value, interval = None, None
        if not np.isnan(values[0]):
            low, high = np.nanpercentile(values[1:], PERCENTILES)
            value, interval = float(values[0]), (float(low), float(high))
        made.append(Number("  " * depth + column.name, value, interval, draws.size(column)))
    return made
