"""Reads the rows of a task from files on this machine, one row for each problem."""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_gdpo.data_prep import DataError, LeftOut, progress
from verl_gdpo.data_prep.parquet import parquet_rows
from verl_gdpo.data_prep.schema import Row, Splits, check_rows, repetitions, require
from verl_gdpo.rewards.task import Task

if TYPE_CHECKING:
    from verl_gdpo.data_prep.sources import Sources

SPLIT_SEED, TEST_SHARE = 31415, 0.02  # as in ToolRL
SHOWN = 20  # numbers of rows that are left out or repaired
# (object of a file, what takes a note about it) -> row; raises ValueError for a bad object
RowOf = Callable[[Any, Callable[[str], None]], Row]
Mend = Callable[[str], tuple[str, str]]  # ground truth -> the one to write, what was repaired
Notes = dict[str, list[int]]  # what happened -> to which rows


def read_rows(path: Path, split: str, sources: "Sources") -> list[Row]:
    """Return one row for each problem of a file, checked, with a new index and split.

    What is left out or repaired is printed. Of rows that ask the same, the first is kept, if they
    agree on the answer; else none of them.

    Args:
        split: "train" or "test", for `extra_info`.
        sources: the task, and how to make its rows.

    Raises:
        DataError: the file is not readable, or a row is bad. The message names the file, and for a
            bad row its number (from 0) and the field.
        OSError: the file cannot be opened.
    """
    if path.suffix == ".parquet":
        items, row_of = parquet_rows(path), sources.of_parquet
    elif path.suffix in (".json", ".jsonl"):
        items, row_of = iter(_read_json(path)), sources.row_of
    else:
        raise DataError(
            f"{path}: got suffix {path.suffix!r}; expected '.json', '.jsonl' or '.parquet'"
        )
    with _printed(path) as notes:
        found = _rows_of(items, path, row_of, notes)
        found = dict(zip(found, numbered([*found.values()], split, sources.dropped), strict=True))
        check_rows(found, str(path))
        for number, row in found.items():
            if row["data_source"] not in sources.task.data_sources:
                raise DataError(
                    f"{path}, row {number}, field data_source: got {row['data_source']!r}; "
                    f"expected {' or '.join(map(repr, sources.task.data_sources))}"
                )
        if sources.mend is not None:
            found = _mended(found, path, sources.mend, notes)
        for what, numbers in repetitions(found, sources.task).items():
            notes[f"left out ({what})"] = sorted(numbers)
            for number in numbers:
                del found[number]
    return numbered([*found.values()], split)


@contextmanager
def _printed(path: Path) -> Iterator[Notes]:
    """Print on stderr what is noted, also if an error follows."""
    notes: Notes = defaultdict(list)
    try:
        yield notes
    finally:
        for what, numbers in notes.items():
            rows = [*dict.fromkeys(map(str, numbers))]
            shown = ", ".join(rows[:SHOWN]) + (", ..." if len(rows) > SHOWN else "")
            print(f"{path}: {len(numbers):,} x {what}: row {shown}", file=sys.stderr)


def _rows_of(items: Iterable[Any], path: Path, row_of: RowOf, notes: Notes) -> dict[int, Row]:
    """{place in the file: row}, without those that are left out."""
    rows: dict[int, Row] = {}
    for number, item in enumerate(progress(items, f"reading {path}")):

        def note(what: str, number: int = number) -> None:
            notes[what].append(number)

        try:
            rows[number] = row_of(item, note)
        except LeftOut as why:
            note(f"left out ({why})")
        except ValueError as error:
            raise DataError(f"{path}, row {number}, {error}") from error
    return rows


def _mended(rows: dict[int, Row], path: Path, mend: Mend, notes: Notes) -> dict[int, Row]:
    """The rows with the ground truths that `mend` makes of theirs."""

    def try_to_mend(number: int) -> tuple[str | None, str]:
        try:
            truth, what = mend(rows[number]["reward_model"]["ground_truth"])
        except LeftOut as why:
            return None, f"left out ({why})"
        except ValueError as error:
            field = "field reward_model.ground_truth"
            raise DataError(f"{path}, row {number}, {field}: {error}") from error
        return truth, what and f"repaired ({what})"

    mended: dict[int, Row] = {}
    with ThreadPoolExecutor() as pool:
        results = zip(rows.items(), pool.map(try_to_mend, rows), strict=True)
        for (number, row), (truth, what) in progress(results, f"trying the answers of {path}"):
            if what:
                notes[what].append(number)
            if truth is not None:
                reward_model = {**row["reward_model"], "ground_truth": truth}
                mended[number] = {**row, "reward_model": reward_model}
    return mended


def strings_of(item: Any, keys: Sequence[str]) -> dict[str, str]:
    """Return `item` after checking that it is an object with exactly these keys and str values.

    Raises:
        ValueError: the item is something else.
    """
    require(isinstance(item, dict), "", item, "an object")
    for key in (*keys, *item):
        if key not in keys:
            # an unknown key is an error, because it could be meant for the prompt ("history")
            raise ValueError(f"field {key}: unknown; expected only {tuple(keys)}")
        if key not in item:
            raise ValueError(f"field {key}: got nothing; expected a str")
        require(isinstance(item[key], str), key, item[key], "a str")
    return dict(item)


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


def seeded(name: str, row_of: Callable[[Random, str], Row]) -> Callable[..., list[Row]]:
    """Return `make_rows(count, *, split, seed)`, whose row i depends on i, split and seed alone.

    Args:
        row_of: makes a row of the split "train" or "test" out of random numbers.
    """

    def make_rows(count: int, *, split: str, seed: int) -> list[Row]:
        # a string seeds Random through SHA-512: the same in every process, unlike hash()
        seeds = (f"verl-gdpo {name} {split} {seed} {index}" for index in range(count))
        return [row_of(Random(text), split) for text in seeds]

    return make_rows


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
    parts = {"train": shuffled[:-test_count], "test": shuffled[-test_count:]}
    return {split: numbered(part, split) for split, part in parts.items()}


def _read_json(path: Path) -> list[Any]:
    try:
        content = path.read_bytes()
        text = content.decode(json.detect_encoding(content)).strip()  # with a BOM or without
        if path.suffix == ".jsonl":  # made one list; the line numbers in errors stay right
            text = "[" + re.sub(r"\n(?=[^\S\n]*\S)", "\n,", text) + "]"
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: got a JSON {type(items).__name__}; expected a list of objects")
    return items
