"""Rows of the user's, scored by a reward function of the user's, as training calls it.

    verl-gdpo evaluate MODEL --rewards my_rewards.py:compute_score --rows test.parquet

Every number that the function returns is a column, except `score`; a data source is a category.
"""

import asyncio
import inspect
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_gdpo.algorithm.values import is_number, value_or_error
from verl_gdpo.scoring.own_copy import own_copy
from verl_gdpo.scoring.response import PARTS
from verl_gdpo.scoring.signatures import taken_arguments
from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.preparation.local_files import items_of, parsed
from verl_gdpo.tools.evaluate.benchmark import (
    Answer,
    Benchmark,
    Question,
    ScoreColumn,
    Scores,
    ask_once,
)
from verl_gdpo.tools.run_folder.dump_reader import Scorer, named_rewards
from verl_gdpo.tools.run_folder.scorer_options import options_of_function

# It stands in the place of a benchmark's name.
NAME = "own_rewards"
# A run says its own.
MAX_TOKENS = 1024


class OwnRewards:
    """A reward function, and what it has returned so far."""

    def __init__(self, name: str) -> None:
        """Load the function.

        Args:
            name: FILE.py:FUNCTION or MODULE:FUNCTION.

        Raises:
            ValueError: there is no such function, or it is a task.
        """
        if name in TASKS:
            raise ValueError(f"--rewards {name}: it is a task; ask for it with --bench {name}")
        self.scorer = Scorer.of_function(name, option="--rewards")
        # {data source: {reward: None}}, in the order in which they came
        self.rewards: dict[str, dict[str, None]] = {}

    def columns(self, sources: Sequence[str]) -> list[ScoreColumn]:
        return columns_of(self.rewards, sources)

    def questions(self, options: Namespace) -> list[Question]:
        """Return a question for each row; see `Benchmark`.

        Raises:
            ValueError: no file is named, or a row cannot be asked or scored.
            OSError, DataError: a file cannot be read.
        """
        keywords = self.keywords(options)
        questions: list[Question] = []
        for path, name in _names_of(_files(options)).items():
            for number, item in enumerate(items_of(path)):
                place = f"{path}, row {number}"
                row = _checked(item, place)
                score = partial(self._score, row, place, keywords)
                question = Question(
                    key=f"{name}_{number}",
                    category=str(row["data_source"]),
                    start=partial(ask_once, row["prompt"], score),
                    ground_truth=_as_text(row["reward_model"]["ground_truth"]),
                )
                questions.append(question)
        if not questions:
            raise ValueError("--rows: there is no row in these files")
        return questions

    def keywords(self, options: Namespace) -> dict[str, Any]:
        """Return the function's options in the run, if it was trained with this function."""
        return options_of_function(self.scorer.name, options.of_config, is_validation=True)

    def described(self, options: Namespace) -> dict[str, Any]:
        """Return what two results have to share."""
        return {"rewards": self.scorer.name, **self.keywords(options)}

    def _score(
        self, row: Mapping[str, Any], place: str, keywords: Mapping[str, Any], answer: Answer
    ) -> Scores:
        """Return the rewards of an answer that apply to its row."""
        source = str(row["data_source"])
        try:
            result = _called(self.scorer, row, answer, keywords)
            named = named_rewards(result, "it")
        except Exception as error:
            raise ValueError(
                f"--rewards {self.scorer.name}: {type(error).__name__} for {place}: {error}"
            ) from error
        scores = {}
        rewards = self.rewards.setdefault(source, {})
        for name, value in named.items():
            if name != "score" and is_number(value):
                what = f"--rewards {self.scorer.name}: for {place}, {name!r} "
                number = value_or_error(value, what)
                assert number is not None
                scores[name] = number
                rewards[name] = None
        return scores


def benchmark_of(own: OwnRewards) -> Benchmark:
    """Return the benchmark that asks rows, and scores the answers with a function."""
    return Benchmark(
        name=NAME,
        summary="rows and a reward function of your own",
        questions=own.questions,
        columns=own.columns,
        max_tokens=MAX_TOKENS,
        data_source=NAME,
        scorer=own.described,
        percent=False,
    )


def benchmark_of_result(result: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark whose columns are those of a result, for a comparison."""
    rewards: dict[str, dict[str, None]] = {}
    for problem in result["problems"].values():
        of_category = rewards.setdefault(problem["category"], {})
        of_category.update(dict.fromkeys(problem["scores"]))
    return Benchmark(
        name=NAME,
        summary="",
        questions=lambda _options: (),
        columns=partial(columns_of, rewards),
        max_tokens=MAX_TOKENS,
        data_source=NAME,
        percent=False,
    )


def columns_of(
    rewards: Mapping[str, Mapping[str, None]], sources: Sequence[str]
) -> list[ScoreColumn]:
    """Return a column for each reward: over its data source, or the mean over several of them."""
    # {reward: the data sources that have it}, in the order in which the rewards came
    sources_of: dict[str, list[str]] = {}
    for source in sources:
        for name in rewards.get(source, ()):
            sources_of.setdefault(name, []).append(source)

    columns = []
    for name, having in sources_of.items():
        if len(having) == 1:
            columns.append(ScoreColumn(name, category=having[0], score=name))
        else:
            leaves = [ScoreColumn(source, category=source, score=name) for source in having]
            columns.append(ScoreColumn(name, parts=tuple(leaves)))
    return columns


def _called(
    scorer: Scorer, row: Mapping[str, Any], answer: Answer, keywords: Mapping[str, Any]
) -> Any:
    """Return what the function returns, called as the reward manager calls it in validation.

    As a function of a list, it gets what it takes.
    """
    response = answer.response
    extra_info = own_copy(dict(row.get("extra_info") or {}))
    extra_info["response_tokens"] = answer.tokens
    extra_info["generated_tokens"] = response.generated_tokens
    extra_info["is_validation"] = True
    extra_info["validate"] = True
    extra_info["tool_seconds"] = 0.0
    # They are the prompt and the answer.
    extra_info["num_turns"] = 2
    arguments = {
        "data_source": row["data_source"],
        "solution_str": answer.text,
        "ground_truth": own_copy(row["reward_model"]["ground_truth"]),
        "extra_info": extra_info,
        "answer_str": response.answer,
        "reasoning_str": response.reasoning,
        "prompt": own_copy(list(row["prompt"])),
    }
    taken = taken_arguments(scorer.function, arguments, if_named=(*PARTS, "prompt"))
    result = scorer.function(**{**taken, **keywords})
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    return result


def _files(options: Namespace) -> list[Path]:
    """Return the files that --rows names, or those on which the run validated."""
    if options.rows:
        return list(options.rows)
    files = options.of_config("data.val_files", None)
    if not files:
        raise ValueError("--rewards needs --rows FILE: only a run's folder says which rows it has")
    if not isinstance(files, list):
        files = [files]
    return [Path(file) for file in files]


def _names_of(paths: Sequence[Path]) -> dict[Path, str]:
    """Return {file: its name, with as many of its folders as tell all files apart}.

    A result of the same files elsewhere has the same names, so that the two can be compared.

    Raises:
        ValueError: a file is there twice.
    """
    names: dict[Path, str] = {}
    for path in paths:
        if path in names:
            raise ValueError(f"--rows {path}: the file is named twice; name it once")
        names[path] = path.name
    longest = max(len(path.parts) for path in paths)
    for count in range(2, longest + 1):
        if len(set(names.values())) == len(names):
            break
        names = {path: "/".join(path.parts[-count:]) for path in paths}
    return names


def _checked(item: Any, place: str) -> Mapping[str, Any]:
    """Return the row of a file's item; raise ValueError if it does not have verl's columns."""
    try:
        row: Mapping[str, Any] = parsed(item)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    contents = []
    try:
        _ = row["data_source"]
        _ = row["reward_model"]["ground_truth"]
        for message in row["prompt"]:
            _ = message["role"]
            contents.append(message["content"])
    except (LookupError, TypeError) as error:
        raise ValueError(
            f"{place}: {type(error).__name__} {error}; expected verl's columns data_source, prompt "
            "(a list of messages with role and content) and reward_model.ground_truth"
        ) from None
    if not contents or not all(isinstance(content, str) for content in contents):
        raise ValueError(f"{place}: expected a prompt of one message or more, each with a text")
    return row


def _as_text(ground_truth: Any) -> str:
    if isinstance(ground_truth, str):
        return ground_truth
    return json.dumps(ground_truth, default=str)
