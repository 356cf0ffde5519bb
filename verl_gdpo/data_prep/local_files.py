"""The rows of any task from files on this machine, and how rows are numbered and split.

A file is *.parquet in verl's schema, or *.json (a list) or *.jsonl (a line each) of objects
{"question": ..., "answer": ...}: the user's message and the ground truth. A task with objects of
another form, or with a source of its own, has a file of its name in this folder.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.data_prep import DataError, LeftOut
from verl_gdpo.data_prep.progress import Progress
from verl_gdpo.data_prep.schema import Row, Splits, check_rows, read_parquet
from verl_gdpo.rewards.task import Task

SPLIT_SEED, TEST_SHARE = 31415, 0.02  # ToolRL's
KEYS = ("question", "answer")
SHOWN = 20  # numbers of rows that are left out
RowOf = Callable[[Any, str], Row]  # an object of a file, and what a message calls it


def add_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --from and --test."""
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        type=Path,
        required=required,
        help="local .json, .jsonl or .parquet; split into train and test unless --test is given",
    )
    parser.add_argument("--test", metavar="FILE", type=Path, help="with --from: the test rows")


def load(args: argparse.Namespace, task: Task) -> Splits:
    """Return the checked rows of both files.

    Raises:
        DataError: a file is not readable, or holds a row that is refused.
        OSError: a file cannot be opened.
    """
    return load_files(args.source, args.test, task, _question_rows(task))


def load_files(
    source: Path, test: Path | None, task: Task, row_of: RowOf, dropped: Sequence[str] = ()
) -> Splits:
    """Return the rows of two files or, if `test` is None, of one that is split."""
    rows = read_rows(source, "train", task, row_of, dropped)
    if test is None:
        return split_rows(rows, str(source))
    return {"train": rows, "test": read_rows(test, "test", task, row_of, dropped)}


def read_rows(
    path: Path, split: str, task: Task, row_of: RowOf, dropped: Sequence[str] = ()
) -> list[Row]:
    """Return a file's rows, checked and numbered.

    Args:
        path: index and split in `extra_info` are set anew.
        split: "train" or "test", for `extra_info`.
        row_of: makes a row of an object in *.json or *.jsonl; raises LeftOut for one without use.
        dropped: keys of `extra_info` that are left out.

    Raises:
        DataError: names the file and, for a bad row, the row (from 0) and its field.
        OSError: it cannot be read.
    """
    if path.suffix == ".parquet":
        found = dict(enumerate(read_parquet(path)))
    elif path.suffix in (".json", ".jsonl"):
        found = _rows_of(_read_json(path), path, row_of)
    else:
        raise DataError(
            f"{path}: got suffix {path.suffix!r}; expected '.json', '.jsonl' or '.parquet'"
        )
    rows = numbered([*found.values()], split, dropped)
    check_rows(rows, str(path), [*found])
    for number, row in zip(found, rows, strict=True):
        if row["data_source"] not in task.data_sources:
            raise DataError(
                f"{path}, row {number}, field data_source: got {row['data_source']!r}; expected "
                f"{' or '.join(map(repr, task.data_sources))}"
            )
    return rows


def _rows_of(items: Sequence[Any], path: Path, row_of: RowOf) -> dict[int, Row]:
    """{place in the file: row}, without those that are left out."""
    rows: dict[int, Row] = {}
    progress = Progress(f"reading {path}", len(items), "rows")
    left_out: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        try:
            progress.at(number)
            rows[number] = row_of(item, f"{path}, row {number}")
        except LeftOut as why:
            left_out.setdefault(str(why), []).append(number)
    for reason, numbers in left_out.items():
        shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
        print(
            f"{path}: left out {len(numbers):,} of {len(items):,} rows ({reason}): row {shown}",
            file=sys.stderr,
        )
    return rows


def strings_of(item: Any, keys: Sequence[str], where: str) -> dict[str, str]:
    """`item`, checked to be an object with exactly these keys, all of them texts.

    Raises:
        DataError: it is not; `where` is what the message calls it.
    """
    if not isinstance(item, dict):
        raise DataError(f"{where}, the whole row: got {repr(item)[:80]}; expected an object")
    for key in (*keys, *item):
        if key not in keys:
            # not passed over: a "history", say, would be part of the prompt
            raise DataError(f"{where}, field {key}: unknown; expected only {tuple(keys)}")
        if not isinstance(item.get(key), str):
            got = repr(item[key])[:80] if key in item else "nothing"
            raise DataError(f"{where}, field {key}: got {got}; expected a str")
    return item


def make_row(
    task: Task, question: str, ground_truth: str, system: str | None = None, ability: str = ""
) -> Row:
    """A row without number; `system` is the system message, if any."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "data_source": task.data_sources[0],
        "prompt": [*messages, {"role": "user", "content": question}],
        "ability": ability or task.name,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {},
    }


def numbered(rows: Sequence[Row], split: str, dropped: Sequence[str] = ()) -> list[Row]:
    """The rows with their place and split in `extra_info`, and without its `dropped` keys."""

    def placed(row: Row, index: int) -> Row:
        extra = row.get("extra_info") or {}
        if not isinstance(extra, Mapping):
            return row  # for check_rows to refuse
        kept = {key: value for key, value in extra.items() if key not in dropped}
        return {**row, "extra_info": {**kept, "index": index, "split": split}}

    return [placed(row, index) for index, row in enumerate(rows)]


def split_rows(rows: Sequence[Row], where: str) -> Splits:
    """Split as ToolRL did: shuffled by numpy's legacy generator, the last 2 % are the test rows.

    Raises:
        DataError: too few rows to hold out one; `where` is what the message calls them.
    """
    test_count = int(TEST_SHARE * len(rows))
    if test_count == 0:
        raise DataError(
            f"{where}: got {len(rows)} rows, of which int({TEST_SHARE} * {len(rows)}) = 0 would be "
            "test rows; expected at least 50, or the test rows in a file of their own: --test FILE"
        )
    order = np.arange(len(rows))
    np.random.RandomState(SPLIT_SEED).shuffle(order)
    shuffled = [rows[i] for i in order.tolist()]
    return {
        "train": numbered(shuffled[:-test_count], "train"),
        "test": numbered(shuffled[-test_count:], "test"),
    }


def _question_rows(task: Task) -> RowOf:
    def row_of(item: Any, where: str) -> Row:
        fields = strings_of(item, KEYS, where)
        return make_row(task, fields["question"], fields["answer"], task.system_prompt)

    return row_of


def _read_json(path: Path) -> list[Any]:
    try:
        text = path.read_bytes()
        if path.suffix == ".jsonl":  # as a list, in which an error's line is the file's
            text = b"[" + b"\n,".join(text.strip().split(b"\n")) + b"]"
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: got a JSON {type(items).__name__}; expected a list of objects")
    return items
