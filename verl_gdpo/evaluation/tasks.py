"""The tests of our own tasks, scored by the task's own scorer: tool_rl, gsm8k, math and coding.

A file is one that data preparation wrote (*.parquet), or one that it reads (*.json, *.jsonl). Each
file is a category with the name of the file, or of its folder for a file `test.parquet`: so
`--data aime.json amc.json` gives a number for each of the two, and their mean.
"""

import importlib
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from verl_gdpo.data_prep import DataError
from verl_gdpo.data_prep.local_files import read_rows
from verl_gdpo.data_prep.parquet import parquet_rows
from verl_gdpo.data_prep.schema import check_rows
from verl_gdpo.data_prep.sources import WEAK
from verl_gdpo.evaluation.benchmark import Benchmark
from verl_gdpo.evaluation.questions import Column, OneAnswer, Question, Scores
from verl_gdpo.rewards import TASKS, options_for, options_of

# {score: function of the task's rewards}
Shown = Mapping[str, Callable[[Mapping[str, Any]], float]]


@dataclass(frozen=True)
class Kind:
    """How a task becomes a benchmark.

    scores: what its columns show of the rewards, in their order.
    options: of the scorer, whatever a run has.
    """

    task: str
    scores: Shown
    options: Mapping[str, Any]

    @property
    def source(self) -> str:
        """The data source of the task's rows."""
        return TASKS[self.task].data_sources[0]


def questions(options: Namespace, kind: Kind) -> Sequence[Question]:
    """Return a question for each row; see `Benchmark`.

    Raises:
        OSError: this machine cannot score the answers.
    """
    chosen = _scorer_options(options, kind)
    TASKS[kind.task].missing(**chosen)
    score = partial(TASKS[kind.task].score, step=options.step, **chosen)
    found: list[Question] = []
    paths = _files(options, kind)
    for path in paths:
        name = path.parent.name if path.stem in ("test", "train") else path.stem
        if any(question.category == name for question in found):
            raise ValueError(f"--data: two files have the name {name!r}; rename one")
        rows = _rows(path, kind, is_given=bool(options.data))
        found += [_question(row, name, k, score, kind) for k, row in enumerate(rows)]
    if not found:
        sources = TASKS[kind.task].data_sources
        raise ValueError(f"no row of {sources} is in {[*map(str, paths)]}; pass --data FILE")
    return found


def _question(
    row: Mapping[str, Any], name: str, number: int, score: Callable[..., Any], kind: Kind
) -> Question:
    truth = row["reward_model"]["ground_truth"]

    def of_answer(text: str, tokens: int) -> Scores:
        rewards = score(text, truth, response_tokens=tokens)
        return {said: read(rewards) for said, read in kind.scores.items()}

    return Question(
        f"{name}_{number}", name, partial(OneAnswer, row["prompt"], of_answer), ground_truth=truth
    )


def _files(options: Namespace, kind: Kind) -> list[Path]:
    """The files that --data names, or those that the run validated on."""
    if options.data:
        return [path / "test.parquet" if path.is_dir() else path for path in options.data]
    files = options.of_config("data.val_files", None)
    if not files:
        raise ValueError(
            "--data FILE is needed: only a run's folder says which rows belong to it. "
            f"`verl-gdpo data {kind.task} --out FOLDER` writes FOLDER/test.parquet"
        )
    return [Path(file) for file in (files if isinstance(files, list) else [files])]


def _rows(path: Path, kind: Kind, is_given: bool) -> Iterator[Mapping[str, Any]]:
    """The checked rows of a file; ValueError for what is no row of the task in a given one.

    A run may validate on several tasks.
    """
    task = TASKS[kind.task]
    try:
        if path.suffix == ".parquet":
            rows = list(parquet_rows(path))
            check_rows(dict(enumerate(rows)), str(path))
        else:
            sources = importlib.import_module(f"verl_gdpo.data_prep.{kind.task}").SOURCES
            rows = read_rows(path, "test", sources)
    except DataError as error:
        raise ValueError(str(error)) from error
    for number, row in enumerate(rows):
        if row["data_source"] in task.data_sources:
            yield row
        elif is_given:
            raise ValueError(
                f"{path}, row {number}, field data_source: got {row['data_source']!r}; expected "
                f"one of {task.data_sources}"
            )


def _scorer_options(options: Namespace, kind: Kind) -> dict[str, Any]:
    """The options that a run's scorer had, and those that the benchmark needs."""
    of_run = options.of_config("reward.reward_kwargs", {})
    weak = {WEAK: True} if getattr(options, f"{kind.task}_{WEAK}", False) else {}
    return {**options_for(kind.source, of_run), **kind.options, **weak}


def _scorer(options: Namespace, kind: Kind) -> dict[str, Any]:
    """All options of the scorer, those that nobody has set too."""
    task = TASKS[kind.task]
    parameters = inspect.signature(task.score).parameters
    defaults = {name: parameters[name].default for name in options_of(task)}
    return {**defaults, **_scorer_options(options, kind)}


def _add_weak(group: Any) -> None:
    about = "let programs run in a weak sandbox, if no better one is here: docs/sandbox.md"
    group.add_argument("--coding-weak-sandbox", action="store_true", help=about)


def columns(questions: Sequence[Question], kind: Kind) -> Sequence[Column]:
    """Return each score over all files; with several, it is the mean of theirs."""
    files = list(dict.fromkeys(question.category for question in questions))
    if len(files) == 1:
        return [Column(name, category=files[0], score=name) for name in kind.scores]
    return [
        Column(name, parts=tuple(Column(file, category=file, score=name) for file in files))
        for name in kind.scores
    ]


def _benchmark(name: str, summary: str, kind: Kind, max_tokens: int, **more: Any) -> Benchmark:
    ask, show = partial(questions, kind=kind), partial(columns, kind=kind)
    of_scorer = partial(_scorer, kind=kind)
    return Benchmark(name, summary, ask, show, max_tokens, kind.source, scorer=of_scorer, **more)


TOOL_RL = Kind("tool_rl", {name: itemgetter(name) for name in ("correctness", "format")}, {})
GSM8K = Kind("gsm8k", {name: itemgetter(name) for name in ("correctness", "integer", "format")}, {})
ABOVE: Shown = {"above the limit": lambda rewards: 1 - rewards["length"]}
MATH = Kind("math_length", {"accuracy": itemgetter("correctness"), **ABOVE}, {})
CODING = Kind(
    "coding",
    {
        "tests passed": itemgetter("pass"),
        "solved": lambda rewards: float(rewards["pass"] == 1),
        **ABOVE,
        "bugs": lambda rewards: 1 - rewards["bug"],
    },
    {
        "length_needs_pass": False,  # the share of long answers is over all answers
        "max_tests": sys.maxsize,
        "wall_seconds": 120.0,  # of all tests; the first one at its own limit is the last
    },
)

# the limits of tokens are those of the paper's training; a run has its own
BENCHMARKS = (
    _benchmark("tool_rl", "ToolRL's rewards on test rows", TOOL_RL, 1024, percent=False),
    _benchmark("gsm8k", "the three rewards of GSM8K", GSM8K, 1024),
    _benchmark("math", "accuracy, and the share above 4,000 tokens", MATH, 8000),
    _benchmark(
        *("coding", "tests passed, answers above 4,000 tokens, bugs", CODING, 8000),
        add_options=_add_weak,
    ),
)
