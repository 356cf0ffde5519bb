"""The test rows of a task, scored by the task's own scorer.

A file is one that data preparation wrote (*.parquet), or one that it reads (*.json, *.jsonl). Each
file is a category with the name of the file, or of its folder for a file `test.parquet`: so
`--data aime.json amc.json` gives a number for each of the two, and their mean.
"""

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from verl_gdpo.scoring.response import arguments_for
from verl_gdpo.tasks import Task, options_of
from verl_gdpo.tasks.preparation.loading import teaching, with_options
from verl_gdpo.tasks.preparation.local_files import read_rows
from verl_gdpo.tasks.preparation.prepared_files import parquet_rows
from verl_gdpo.tasks.preparation.schema import checked
from verl_gdpo.tasks.preparation.sources import CALL_FORMAT, WEAK, sources_of
from verl_gdpo.tools.evaluate.benchmark import (
    Answer,
    Benchmark,
    Question,
    ScoreColumn,
    Scores,
    ask_once,
)
from verl_gdpo.tools.run_folder.scorer_options import options_of_task

# {column: function of the rewards}. It returns None where a reward does not apply to the row.
Shown = Mapping[str, Callable[[Mapping[str, Any]], float | None]]


def questions(options: Namespace, task: Task) -> Sequence[Question]:
    """Return a question for each row; see `Benchmark`.

    Raises:
        OSError: this machine cannot score the answers.
        ValueError: the scorer does not take its options, or there are no rows.
        DataError: a file cannot be read.
    """
    chosen = _scorer(options, task)
    task.missing(**chosen)
    # It raises ValueError for a value that the scorer does not take.
    task.bounds(**chosen)
    score = partial(_rewards, task, step=options.step, **chosen)

    made: list[Question] = []
    paths = _files(options, task)
    shown = _shown(task)
    for path in paths:
        name = path.stem
        if name in ("test", "train"):
            name = path.parent.name
        if any(question.category == name for question in made):
            raise ValueError(f"--data: two files have the name {name!r}; rename one")
        for number, row in enumerate(_rows(path, task, chosen)):
            made.append(_question(row, name, number, score, shown))
    if not made:
        files = [str(path) for path in paths]
        raise ValueError(f"no row of {task.data_sources} is in {files}; pass --data FILE")
    return made


def _rewards(task: Task, answer: Answer, truth: str, **options: Any) -> Mapping[str, Any]:
    """Return the rewards of an answer, of which the task scores what it scores in training."""
    text, told = arguments_for(task, answer.response)
    return task.score(text, truth, response_tokens=answer.tokens, **told, **options)


def _question(
    row: Mapping[str, Any], name: str, number: int, score: Callable[..., Any], shown: Shown
) -> Question:
    """Return the question of a row.

    Args:
        name: that of its file.
        number: its place in the file.
        score: `score(answer, ground_truth)` returns the rewards.
    """
    truth = row["reward_model"]["ground_truth"]

    def of_answer(answer: Answer) -> Scores:
        rewards = score(answer, truth)
        scores = {}
        for column, read in shown.items():
            value = read(rewards)
            if value is not None:
                scores[column] = value
        return scores

    start = partial(ask_once, row["prompt"], of_answer)
    return Question(f"{name}_{number}", name, start, ground_truth=truth)


def _files(options: Namespace, task: Task) -> list[Path]:
    """Return the files that --data names, or those that the run validated on."""
    if options.data:
        paths = []
        for path in options.data:
            if path.is_dir():
                paths.append(path / "test.parquet")
            else:
                paths.append(path)
        return paths
    files = options.of_config("data.val_files", None)
    if not files:
        raise ValueError(
            "--data FILE is needed: only a run's folder says which rows belong to it. "
            f"`verl-gdpo data {task.name} --out FOLDER` writes FOLDER/test.parquet"
        )
    if not isinstance(files, list):
        files = [files]
    return [Path(file) for file in files]


def _rows(path: Path, task: Task, chosen: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the checked rows of the task in a file; a run may validate on several tasks.

    Args:
        chosen: the options of the scorer, which may run solutions of the rows too.
    """
    if path.suffix == ".parquet":
        rows = [row for _, row in checked(enumerate(parquet_rows(path)), str(path))]
    else:
        sources = with_options(sources_of(task), chosen)
        if sources.in_call_format is not None:
            # Rows in verl's form were prepared, and teach what they say.
            as_prepared = sources.of_verl
            sources = replace(teaching(sources, chosen[CALL_FORMAT]), of_verl=as_prepared)
        rows = list(read_rows(path, "test", sources))
    return [row for row in rows if row["data_source"] in task.data_sources]


def _scorer(options: Namespace, task: Task) -> dict[str, Any]:
    """Return all options of the scorer: of two values, the later one of these counts.

    They are its own defaults, those of the run, those that the benchmark needs, and those of the
    command.

    Raises:
        ValueError: the command has an option that this scorer does not take.
    """
    parameters = inspect.signature(task.score).parameters
    own = {name: parameters[name].default for name in options_of(task)}
    of_run = options_of_task(task, options.of_config, is_validation=True)
    chosen: dict[str, Any] = {}
    if getattr(options, f"{task.name}_{WEAK}", False):
        chosen[WEAK] = True
    if options.call_format is not None:
        if CALL_FORMAT not in own:
            raise ValueError(
                f"--call-format {options.call_format}: the scorer of {task.name} reads no calls of "
                "tools; leave it out"
            )
        chosen[CALL_FORMAT] = options.call_format
    return own | of_run | dict(task.evaluation.options) | chosen


def _shown(task: Task) -> Shown:
    """Return the columns of a task's record, or all of its rewards, the main one first."""
    if task.evaluation.columns:
        return task.evaluation.columns
    names = sorted(task.bounds(), key=lambda name: name != task.main_reward)
    return {name: methodcaller("get", name) for name in names}


def _add_options(group: Any, task: Task) -> None:
    """Add the option of a scorer for the machine that runs it."""
    if WEAK in options_of(task):
        group.add_argument(
            f"--{task.name.replace('_', '-')}-weak-sandbox",
            dest=f"{task.name}_{WEAK}",
            action="store_true",
            help="let programs, and solutions of --data, run in a weak sandbox, if no better one "
            "is here",
        )


def columns(files: Sequence[str], task: Task) -> Sequence[ScoreColumn]:
    """Return each score over all files; with several, it is the mean of theirs."""
    if len(files) == 1:
        return [ScoreColumn(name, category=files[0], score=name) for name in _shown(task)]
    made = []
    for name in _shown(task):
        of_files = tuple(ScoreColumn(file, category=file, score=name) for file in files)
        made.append(ScoreColumn(name, parts=of_files))
    return made


def benchmark_of(task: Task) -> Benchmark:
    """Return the benchmark of a task's rows."""
    return Benchmark(
        name=task.name,
        summary=", ".join(_shown(task)),
        questions=partial(questions, task=task),
        columns=partial(columns, task=task),
        max_tokens=task.evaluation.max_tokens,
        data_source=task.data_sources[0],
        add_options=partial(_add_options, task=task),
        scorer=partial(_scorer, task=task),
        kept_tokens=task.kept_tokens,
        percent=all(low >= 0 and high <= 1 for low, high in task.bounds().values()),
    )
