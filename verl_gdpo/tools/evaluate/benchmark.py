"""Evaluates a trained policy: `verl-gdpo evaluate`. What a benchmark asks, and what it counts."""

from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from verl_gdpo.scoring.response import Response, Turn

Messages = Sequence[Mapping[str, str]]  # [{"role": "user", "content": "..."}, ...]
Scores = Mapping[str, float]


@dataclass(frozen=True)
class Answer:
    """A text of the policy, without special tokens.

    tokens: its length.
    is_cut: the limit of output tokens ended it.
    read: the same, as training would score it; None for a text without a prompt.
    """

    text: str
    tokens: int
    is_cut: bool = False
    read: Response | None = None

    @property
    def response(self) -> Response:
        """The answer, ready for scoring."""
        if self.read is None:
            return Response((Turn(self.text),), self.tokens)
        return self.read


class Outcome(NamedTuple):
    """What a dialogue ends with: its scores, and those of each answer alone.

    The names of the scores are the same for all questions of a category.
    """

    scores: Scores
    of_answers: Sequence[Scores]


# A dialogue about one question. It yields what the policy answers next, and gets None in the place
# of an answer if that is longer than the model can read.
Episode = Generator[Messages, Answer | None, Outcome]


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


def ask_once(
    messages: Messages, score: Callable[[Answer], Scores], lost: Scores | None = None
) -> Episode:
    """Ask for one answer.

    Args:
        score: `score(answer)` scores it.
        lost: the scores without an answer; None for those of an empty one.
    """
    answer = yield messages
    if answer is None:
        if lost is None:
            lost = score(Answer("", 0))
        return Outcome(lost, [])
    scores = score(answer)
    return Outcome(scores, [scores])


@dataclass(frozen=True)
class ScoreColumn:
    """A number of the table: the mean of a score over a category, or of other columns.

    score: with `category`: the mean of this score over its questions.
    parts: without: the mean of these columns.
    by_questions: of the parts, each counts as often as it has questions.
    over_answers: the mean over all answers, and not over questions.
    """

    name: str
    category: str = ""
    score: str = ""
    parts: tuple["ScoreColumn", ...] = ()
    by_questions: bool = False
    over_answers: bool = False


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    name: the NAME in `--bench NAME`.
    summary: one line for `--help`.
    questions: `questions(options)` returns all questions in an order that never changes; it raises
        ValueError or OSError, in one line, where data are missing or bad. `options` has the values
        of `add_options`, `options.data` (a list of Paths, maybe empty: --data), `options.of_config`
        (`Policy.of_config`), `options.call_format` (None if the command names none) and
        `options.step` (of training; 0 for a model).
    columns: `columns(categories)` returns the numbers of the table, from the left to the right.
    max_tokens: the limit of output tokens, unless --max-tokens or the run says another.
    add_options: `add_options(group)` adds the benchmark's own command options with
        `group.add_argument`; their names begin with the benchmark's, so that none is taken twice.
    data_source: stands in the dump.
    scorer: `scorer(options)` returns the options of what scores the answers, which two results
        have to share. It raises ValueError for a `call_format` that it does not read.
    kept_tokens: tags that stay in an answer if they are special tokens; see `Task.kept_tokens`.
    percent: the table shows the numbers as percent.
    notes: sentences for people who compare the numbers with others.
    """

    name: str
    summary: str
    questions: Callable[[Namespace], Sequence[Question]]
    columns: Callable[[Sequence[str]], Sequence[ScoreColumn]]
    max_tokens: int
    data_source: str
    add_options: Callable[[Any], None] = lambda _group: None
    scorer: Callable[[Namespace], Mapping[str, Any]] = lambda _options: {}
    kept_tokens: tuple[str, ...] = ()
    percent: bool = True
    notes: tuple[str, ...] = ()
