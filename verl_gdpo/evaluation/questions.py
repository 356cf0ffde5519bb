"""What a benchmark asks, how a policy's answers go in, and how scores become numbers of a table.

An episode is one dialogue about one question. What it asks next depends on nothing but the answers
so far, so an evaluation that was stopped goes on by giving new episodes the answers on the disk.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Messages = Sequence[Mapping[str, str]]  # [{"role": "user", "content": "..."}, ...]
Scores = Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """A text of the policy, without special tokens.

    tokens: its length.
    is_cut: the limit of output tokens ended it.
    """

    text: str
    tokens: int
    is_cut: bool = False


class Episode(Protocol):
    """A dialogue about one question."""

    def prompt(self) -> Messages | None:
        """Return what the policy answers next, or None at the end."""

    def take(self, answer: Answer) -> Scores:
        """Go on with the answer to `prompt`, and return the scores of this answer alone."""

    def abandon(self) -> None:
        """End it as wrong: the prompt is longer than the model can read."""

    def scores(self) -> Scores:
        """Return the scores of the whole, after the end; the same names for all of a category."""


class OneAnswer:
    """An episode of one prompt.

    score: `score(text, tokens)` scores its answer.
    lost: the scores without an answer; None for those of an empty one.
    """

    def __init__(
        self,
        messages: Messages,
        score: Callable[[str, int], Scores],
        lost: Scores | None = None,
    ) -> None:
        self._messages: Messages | None = messages
        self._score, self._lost = score, lost
        self._scores: Scores = {}

    def prompt(self) -> Messages | None:
        """See `Episode`."""
        return self._messages

    def take(self, answer: Answer) -> Scores:
        """See `Episode`."""
        self._messages, self._scores = None, self._score(answer.text, answer.tokens)
        return self._scores

    def abandon(self) -> None:
        """See `Episode`."""
        self._messages = None
        self._scores = self._score("", 0) if self._lost is None else self._lost

    def scores(self) -> Scores:
        """See `Episode`."""
        return self._scores


@dataclass(frozen=True)
class Question:
    """One question.

    key: names it within the benchmark, on every machine: "simple_12".
    start: returns a new episode, one for each sample.
    ground_truth: is written beside the answers, for people.
    """

    key: str
    category: str
    start: Callable[[], Episode]
    ground_truth: str = ""


@dataclass(frozen=True)
class ScoreColumn:
    """A number of the table: the mean of a score over a category, or of other columns.

    score: with `category`: the mean of this score over its questions.
    parts: without: the mean of these columns.
    by_questions: of the parts, each counts as often as it has questions.
    over_answers: the mean of what `take` returned over all answers, and not over questions.
    """

    name: str
    category: str = ""
    score: str = ""
    parts: tuple["ScoreColumn", ...] = ()
    by_questions: bool = False
    over_answers: bool = False

    def leaves(self) -> Iterator["ScoreColumn"]:
        """The columns below that are means over questions."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()
