"""The record that describes a benchmark to `verl-gdpo evaluate`."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_gdpo.evaluation.questions import Question, ScoreColumn


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    name: the NAME in `--bench NAME`.
    summary: one line for `--help`.
    questions: `questions(options)` returns all questions in an order that never changes; it raises
        ValueError or OSError, in one line, where data are missing or bad. `options` has the values
        of `add_options`, `options.data` (a list of Paths, maybe empty: --data), `options.of_config`
        (`Policy.of_config`) and `options.step` (of training; 0 for a model).
    columns: `columns(questions)` returns the numbers of the table, from the left to the right.
    max_tokens: the limit of output tokens, unless --max-tokens or the run says another.
    add_options: `add_options(group)` adds the benchmark's own command options with
        `group.add_argument`; their names begin with the benchmark's, so that none is taken twice.
    data_source: stands in the rollout dump.
    scorer: `scorer(options)` returns the options of what scores the answers, which two results
        have to share.
    percent: the table shows the numbers as percent.
    notes: sentences for people who compare the numbers with others; they stand in the result.
    """

    name: str
    summary: str
    questions: Callable[[Namespace], Sequence[Question]]
    columns: Callable[[Sequence[Question]], Sequence[ScoreColumn]]
    max_tokens: int
    data_source: str
    add_options: Callable[[Any], None] = lambda _group: None
    scorer: Callable[[Namespace], Mapping[str, Any]] = lambda _options: {}
    percent: bool = True
    notes: tuple[str, ...] = ()
