"""The rows of any task, from files on this machine.

A file is either *.parquet in verl's schema, or *.json (a list) or *.jsonl (one object per line)
with objects {"question": ..., "answer": ...}. The question is the user's message, the answer is the
ground truth. If a task's objects have another form, or its rows come from another source, a file
with the task's name in this folder replaces this one.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.data_prep import DataError, LeftOut
from verl_gdpo.data_prep.schema import Row, Splits, check_rows, read_parquet
from verl_gdpo.rewards.task import Task

SPLIT_SEED, TEST_SHARE = 31415, 0.02  # as in ToolRL
ITEM_KEYS = ("question", "answer")
SHOWN = 20  # numbers of rows that are left out
RowOf = Callable[[Any, str], Row]  # (object of a file, its name in messages) -> row


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
        DataError: a file is not readable, or a row is refused.
        OSError: a file cannot be opened.
    """
    return load_files(args.source, args.test, task, _question_rows(task))


def load_files(
    source: Path, test: Path | None, task: Task, row_of: RowOf, dropped: Sequence[str] = ()
) -> Splits:
    """Return the rows of two files, or split the rows of one file if `test` is None."""
    rows = read_rows(source, "train", task, row_of, dropped)
    if test is None:
        return split_rows(rows, str(source))
    return {"train": rows, "test": read_rows(test, "test", task, row_of, dropped)}


def read_rows(
    path: Path, split: str, task: Task, row_of: RowOf, dropped: Sequence[str] = ()
) -> list[Row]:
    """Return a file's rows, checked, with a new index and split in `extra_info`.

    Args:
        split: "train" or "test", for `extra_info`.
        row_of: function that makes a row from an object in *.json or *.jsonl. It raises LeftOut for
            an object that is of no use.
        dropped: keys of `extra_info` to leave out.

    Raises:
        DataError: the file is not readable, or a row is bad. The message names the file, and for a
            bad row its number (from 0) and the field.
        OSError: the file cannot be opened.
    """
    if path.suffix == ".parquet":
        rows = read_parquet(path)
    elif path.suffix in (".json", ".jsonl"):
        rows = _rows_of(_read_json(path), path, row_of)
    else:
        raise DataError(
            f"{path}: got suffix {path.suffix!r}; expected '.json', '.jsonl' or '.parquet'"
        )
    rows = numbered(rows, split, dropped)
    check_rows(rows, str(path))
    for number, row in enumerate(rows):
        if row["data_source"] not in task.data_sources:
            raise DataError(
                f"{path}, row {number}, field data_source: got {row['data_source']!r}; expected "
                f"{' or '.join(map(repr, task.data_sources))}"
            )
    return rows


def _rows_of(items: Sequence[Any], path: Path, row_of: RowOf) -> list[Row]:
    rows: list[Row] = []
    left_out: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        try:
            rows.append(row_of(item, f"{path}, row {number}"))
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
    """Return `item` after checking that it is an object with exactly these keys and str values.

    Args:
        where: name of the item in the message.

    Raises:
        DataError: the item is something else.
    """
    if not isinstance(item, dict):
        raise DataError(f"{where}, the whole row: got {repr(item)[:80]}; expected an object")
    for key in (*keys, *item):
        if key not in keys:
            # an unknown key is an error, because it could be meant for the prompt ("history")
            raise DataError(f"{where}, field {key}: unknown; expected only {tuple(keys)}")
        if not isinstance(item.get(key), str):
            got = repr(item[key])[:80] if key in item else "nothing"
            raise DataError(f"{where}, field {key}: got {got}; expected a str")
    return item


def make_row(
    task: Task, question: str, ground_truth: str, system: str | None = None, ability: str = ""
) -> Row:
    """Return a row without index and split; `system` is the system message, if any."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return {
        "data_source": task.data_sources[0],
        "prompt": [*messages, {"role": "user", "content": question}],
        "ability": ability or task.name,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {},
    }


def numbered(rows: Sequence[Row], split: str, dropped: Sequence[str] = ()) -> list[Row]:
    """Return the rows with index and split in `extra_info`, and without its `dropped` keys."""

    def placed(row: Row, index: int) -> Row:
        extra = row.get("extra_info") or {}
        if not isinstance(extra, Mapping):
            return row  # check_rows refuses it
        kept = {key: value for key, value in extra.items() if key not in dropped}
        return {**row, "extra_info": {**kept, "index": index, "split": split}}

    return [placed(row, index) for index, row in enumerate(rows)]


def split_rows(rows: Sequence[Row], where: str) -> Splits:
    """Split rows as ToolRL did: shuffle with numpy's legacy generator, the last 2 % are for test.

    Args:
        where: name of the rows in the message.

    Raises:
        DataError: there are too few rows for one test row.
    """
    test_count = int(TEST_SHARE * len(rows))
    if test_count == 0:
        raise DataError(
            f"{where}: got {len(rows)} rows, which gives int({TEST_SHARE} * {len(rows)}) = 0 test "
            "rows; expected at least 50 rows, or another file with the test rows: --test FILE"
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
        fields = strings_of(item, ITEM_KEYS, where)
        return make_row(task, fields["question"], fields["answer"], task.system_prompt)

    return row_of


def _read_json(path: Path) -> list[Any]:
    try:
        text = path.read_bytes()
        if path.suffix == ".jsonl":  # made one list; the line numbers in errors stay right
            text = b"[" + b"\n,".join(text.strip().split(b"\n")) + b"]"
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: got a JSON {type(items).__name__}; expected a list of objects")
    return items
