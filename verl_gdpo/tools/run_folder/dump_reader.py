"""Reads dumps (`trainer.rollout_data_dir`): one file per step, one JSON line per rollout.

    {"input": ..., "output": ..., "gts": ..., "score": 1.0, "step": 7, "uid": "<group>_0_0",
     "group": "<group>", "session": 0, "data_source": "rlla", "response_tokens": 41,
     "generated_tokens": 41, "trained_tokens": 41, "tool_seconds": 0.0, "as_scored": null,
     "rewards": {"format": 1.0, "correctness": 0.0}, "advantage": 0.3, "batch": 0,
     "is_padding": false}

verl writes the first six keys, and `hooks/dump.py` writes the others. `response_tokens` is the
length of the response, as scorers see it. `generated_tokens` are those that the policy wrote
itself, and `tool_seconds` is how long its rollout waited for tools. `trained_tokens` counts the
tokens that the policy trains on: answers of tools and rejected tokens do not count. `as_scored` has
the turns of the policy where scorers saw another text than `output`, see `Response.for_dump`.
`rewards` holds everything that the scorer returned, before weights and conditions. `batch` numbers
the batches of a step, which asynchronous trainers have several of; without it, a dump has one.

A dump that verl wrote without verl-gdpo is scored again by a `Scorer`. Its rows then have the same
keys, with None for the tokens and the advantage, which nobody knows.

Relies on verl 0.9 for dumps of its V1 trainer: `uid` is the key `UID_SESSION_INDEX`, and the
UID of padding begins with "pad" (`verl.trainer.ppo.padding_utils`). The legacy trainer writes no
`uid`.
"""

import asyncio
import inspect
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from verl_gdpo.algorithm.rows import BatchRows, RowKey
from verl_gdpo.algorithm.values import is_number
from verl_gdpo.scoring.response import PARTS, Response, arguments_for
from verl_gdpo.scoring.reward_file import PACKAGE_PREFIX, load
from verl_gdpo.scoring.signatures import taken_arguments
from verl_gdpo.tasks import TASKS, Task
from verl_gdpo.tools.run_folder.scorer_options import (
    options_of_function,
    options_of_task,
    value_of,
)

FUNCTION = "FILE.py:FUNCTION or MODULE:FUNCTION, called as verl does"
HOW = f"{FUNCTION}, or a task of `verl-gdpo data`"
VERL_KEYS = ("input", "output", "gts", "score", "step")
TEXTS = ("input", "output", "gts")
DUMP_KEYS = (
    "uid",
    "group",
    "session",
    "data_source",
    "response_tokens",
    "trained_tokens",
    "rewards",
    "advantage",
    "is_padding",
)
DUMPS_READ = 20  # of a run: reading all of a long one would take minutes
# a text within a line cannot hold it, as its quotation marks have a backslash
SOURCE = re.compile(rb'"data_source": ("(?:[^"\\]|\\.)*")')
WRITING = "verl is still writing it, or was stopped while writing"
SUMMED = f"one summed score a rollout; name the function of each reward: --scorer {HOW}"
NO_UID = "no `uid`: verl's legacy trainer writes none, its V1 trainer does (trainer.use_v1=True)"


@dataclass(frozen=True)
class Scorer:
    """A function that scores a row of a dump; `name` is what the user wrote."""

    name: str
    function: Callable[..., Any]
    task: Task | None = None  # its function takes other arguments than verl's
    data_source: str | None = None  # of rows that do not say theirs
    options: Mapping[str, Any] = field(default_factory=dict)  # more arguments of the function

    @classmethod
    def of(cls, name: str, data_source: str | None = None) -> "Scorer":
        """Return the scorer that `name` stands for as the value of --scorer; see `HOW`.

        Args:
            data_source: of rows that do not say theirs.

        Raises:
            ValueError: there is no such task, module or function.
        """
        if name in TASKS:
            task = TASKS[name]
            return cls(name, task.score, task, data_source or task.data_sources[0])
        expected = f"{HOW} ({', '.join(TASKS)})"
        return replace(cls.of_function(name, "--scorer", expected), data_source=data_source)

    @classmethod
    def of_function(cls, name: str, option: str, expected: str = FUNCTION) -> "Scorer":
        """Return the scorer that calls the function `name`.

        Args:
            option: how the user named it, for messages.
            expected: what the option takes, for messages.

        Raises:
            ValueError: there is no such module or function.
        """
        where, colon, function = name.rpartition(":")
        if not colon:
            raise ValueError(f"{option} {name}: expected {expected}")
        try:
            names = _names_in(where)
        except ValueError as error:
            raise ValueError(f"{option} {error}; expected {expected}") from error
        scorer = names.get(function)
        if not callable(scorer):
            others = [key for key, value in names.items() if inspect.isfunction(value)]
            raise ValueError(f"{option} {name}: no function {function!r}; {where} has {others}")
        return cls(name, scorer)

    def with_options_of(self, config: Any) -> "Scorer":
        """Return the scorer with the options that a run gave to it in training.

        Args:
            config: the run's configuration as a DictConfig, or None.

        Raises:
            ValueError: the run called it with different options.
        """
        of_config = partial(value_of, config)
        if self.task is not None:
            options = options_of_task(self.task, of_config, is_validation=False)
        else:
            options = options_of_function(self.name, of_config, is_validation=False)
        return replace(self, options=options)

    def rewards(self, row: Mapping[str, Any], source: str | None) -> dict[str, Any]:
        """Return everything that the function returns for a row; a bare number is the reward `acc`.

        Args:
            source: the row's data source.

        Raises:
            ValueError: the function raised, or returned neither a number nor {name: reward}.
        """
        length = row.get("response_tokens")
        try:
            if self.task is not None:
                result = self._by_task(self.task, row)
            else:
                result = self._by_function(row, source)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
        except Exception as error:
            of_run = ""
            if self.options:
                of_run = f", and the run's configuration the options {dict(self.options)}"
            raise ValueError(
                f"--scorer {self.name} raised {type(error).__name__}: {error}. A dump gives it the "
                f"response, the ground truth, data_source={source!r} (--data-source NAME), and in "
                f"extra_info response_tokens={length} and generated_tokens{of_run}; it cannot have "
                "more"
            ) from error
        return named_rewards(result, f"--scorer {self.name}")

    def _by_task(self, task: Task, row: Mapping[str, Any]) -> Any:
        """Return what the scorer of a task returns for a row."""
        text, told = arguments_for(task, _response_of(row))
        return task.score(
            text,
            row["gts"],
            response_tokens=row.get("response_tokens"),
            step=row.get("step"),
            **told,
            **self.options,
        )

    def _by_function(self, row: Mapping[str, Any], source: str | None) -> Any:
        """Return what a function returns for a row, as the reward manager calls it."""
        response = _response_of(row)
        extra_info = {}
        length = row.get("response_tokens")
        if length is not None:
            extra_info["response_tokens"] = length
            extra_info["generated_tokens"] = response.generated_tokens
        arguments = {
            "data_source": source,
            "solution_str": row["output"],
            "ground_truth": row["gts"],
            "extra_info": extra_info,
            "answer_str": response.answer,
            "reasoning_str": response.reasoning,
        }
        taken = taken_arguments(self.function, arguments, if_named=PARTS)
        return self.function(**{**taken, **self.options})


def named_rewards(result: Any, what: str) -> dict[str, Any]:
    """Return what a reward function returned as a dict, in which a mere number is `acc`.

    Args:
        what: the function, for a message.

    Raises:
        ValueError: it is neither a number nor {name: reward}.
    """
    if is_number(result):
        return {"acc": float(result)}
    if not isinstance(result, Mapping):
        raise ValueError(f"{what} returned {result!r:.200}; expected a number or rewards")
    named = dict(result)
    if "score" not in named:
        return named
    for name, value in named.items():
        if name != "score" and is_number(value):
            return named
    # The score is the only number, and so the only reward.
    return {"acc": named["score"]} | named


def _response_of(row: Mapping[str, Any]) -> Response:
    """Return the response of a row, ready for scoring."""
    return Response.of_dump(row.get("as_scored"), row["output"], row.get("response_tokens"))


def _names_in(where: str) -> dict[str, Any]:
    """Return {name: value} of a file or a module; raise ValueError if it cannot be loaded."""
    place = where
    if not where.endswith(".py"):
        place = f"{PACKAGE_PREFIX}{where}"
    return vars(load(place))


def dump_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the complete dumps in the order of their steps, and the incomplete dumps.

    verl ends every line. If the last line has no end, verl is still writing the dump, or was
    stopped. Later dumps can still be complete: a run may have got further before it was resumed.

    Args:
        folder: a folder with files such as `7.jsonl`, or a run's folder with them in `rollouts/`,
            or one such file.

    Raises:
        ValueError: there is no complete dump.
    """
    inner = folder / "rollouts"
    if folder.is_file():
        found = [folder]
    elif inner.is_dir():
        found = list(inner.glob("*.jsonl"))
    else:
        found = list(folder.glob("*.jsonl"))
    files = [path for path in found if path.stem.isdecimal()]
    files.sort(key=lambda path: int(path.stem))
    if not files:
        raise ValueError(
            f"{folder}: no dump (STEP.jsonl) here or in rollouts/; "
            "a run writes one with trainer.rollout_data_dir=FOLDER"
        )
    complete = []
    incomplete = []
    for path in files:
        if _has_end(path):
            complete.append(path)
        else:
            incomplete.append(path)
    if not complete:
        raise ValueError(f"{files[0]}: no dump here is complete: {WRITING}")
    return complete, incomplete


def dumps_to_read(files: Sequence[Path]) -> list[Path]:
    """Return at most `DUMPS_READ` dumps at equal distances, with the first and the last one."""
    last = len(files) - 1
    gaps = DUMPS_READ - 1
    places = {round(k * last / gaps) for k in range(DUMPS_READ)}
    return [files[place] for place in sorted(places)]


def read_dump(
    path: Path, scorer: Scorer | None = None, *, with_texts: bool = True
) -> list[dict[str, Any]]:
    """Return the rows of one step.

    Args:
        scorer: scores the rows again; a dump without rewards needs one.
        with_texts: if False, the rows have none of `TEXTS`, which are most of a dump.

    Raises:
        ValueError: a line is not JSON or no rollout, or cannot be scored.
    """
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = _row(json.loads(line), scorer)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error.__cause__
            if not with_texts:
                for key in TEXTS:
                    row.pop(key, None)
            rows.append(row)
    return rows


def read_texts(path: Path, numbers: set[int]) -> dict[int, dict[str, Any]]:
    """Return {number of a row: its `TEXTS`} for some rows of one step."""
    with path.open(encoding="utf-8") as file:
        lines = {number: line for number, line in enumerate(file) if number in numbers}
    texts = {}
    for number, line in lines.items():
        row = json.loads(line)
        texts[number] = {key: row.get(key) for key in TEXTS}
    return texts


def has_rewards(path: Path) -> bool:
    """Return whether verl-gdpo wrote each reward of a rollout into a dump."""
    with path.open(encoding="utf-8") as file:
        line = next(file, "")
    # A line with neither is no dump that we can read, and `read_dump` says why.
    return '"rewards":' in line or '"uid":' not in line


def dumped_rewards(path: Path) -> list[str]:
    """Return the names of the rewards in a dump of verl-gdpo."""
    names: dict[str, None] = {}
    for row in read_dump(path, with_texts=False):
        names.update(dict.fromkeys(row["rewards"]))
    return list(names)


def _row(row: Any, scorer: Scorer | None) -> dict[str, Any]:
    """Return a line of a dump as a row with `DUMP_KEYS`."""
    fields: dict[str, Any] = {}
    if isinstance(row, dict):
        fields = row
    is_of_verl = set(VERL_KEYS) <= fields.keys()
    if is_of_verl and (scorer is not None or "rewards" not in fields):
        if "uid" not in fields:
            raise ValueError(NO_UID)
        if scorer is None:
            raise ValueError(SUMMED)
        return _scored(fields, scorer)
    absent = [key for key in DUMP_KEYS if key not in fields]
    if absent:
        raise ValueError(f"no {absent}; expected a dump of verl's V1 trainer with verl-gdpo")
    return {"batch": 0} | fields


def _scored(row: Mapping[str, Any], scorer: Scorer) -> dict[str, Any]:
    """Return a row with new rewards.

    `scorer_score` is their sum, or what the scorer says that it is, and `sum` is their sum.
    """
    key = RowKey.of_text(row["uid"])
    source = row.get("data_source", scorer.data_source)
    is_padding = row.get("is_padding", key.uid.startswith("pad"))
    rewards: dict[str, Any] = {}
    if not is_padding:
        rewards = scorer.rewards(row, source)
    numbers = []
    for name, value in rewards.items():
        if name != "score" and is_number(value):
            numbers.append(float(value))
    total = sum(numbers)
    score = rewards.pop("score", total)

    # A dump of verl itself lacks these four keys.
    scored: dict[str, Any] = {
        "response_tokens": None,
        "trained_tokens": None,
        "advantage": None,
        "batch": 0,
    }
    scored.update(row)
    scored["group"] = key.uid
    scored["session"] = key.session
    scored["data_source"] = source or ""
    scored["rewards"] = rewards
    scored["is_padding"] = is_padding
    scored["scorer_score"] = score
    scored["sum"] = total
    return scored


def reward_rows(rows: Sequence[Mapping[str, Any]], step: int) -> BatchRows:
    """Return the rows of one step as the estimator saw them."""
    return BatchRows.from_keys(
        keys=[row["uid"] for row in rows],
        infos=[row["rewards"] for row in rows],
        sources=[row["data_source"] for row in rows],
        is_padding=[row["is_padding"] for row in rows],
        step=step,
    )


def _has_end(path: Path) -> bool:
    """Return whether the last line of a file has its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def data_sources(files: Iterable[Path]) -> set[str] | None:
    """Return the data sources of some dumps, or None if they say none, which stands for all.

    The key is searched in the lines: to parse all texts of a run takes minutes.
    """
    sources: set[str] = set()
    for path in files:
        with path.open("rb") as file:
            for line in file:
                sources.update(json.loads(name) for name in SOURCE.findall(line))
    return sources or None
