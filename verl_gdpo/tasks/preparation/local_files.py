"""Reads the rows of a task from files on this machine, one row for each problem."""

import json
import sys
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_gdpo.tasks.preparation import DataError, LeftOut, progress
from verl_gdpo.tasks.preparation.packed_rows import PackedRows, PickedRows
from verl_gdpo.tasks.preparation.parquet import ROWS_AT_ONCE, parquet_rows
from verl_gdpo.tasks.preparation.schema import Row, Splits, checked, repetitions, require
from verl_gdpo.tasks.task import Task

if TYPE_CHECKING:
    from verl_gdpo.tasks.preparation.sources import Sources

SPLIT_SEED, TEST_SHARE = 31415, 0.02  # as in ToolRL
SHOWN = 20  # numbers of rows that are left out or repaired
# (object of a file, what takes a note about it) -> row; raises ValueError for a bad object
RowOf = Callable[[Any, Callable[[str], None]], Row]
Mend = Callable[[str], tuple[str, str]]  # ground truth -> the one to write, what was repaired
Notes = dict[str, list[int]]  # what happened -> to which rows


def read_rows(path: Path, split: str, sources: "Sources") -> Sequence[Row]:
    """Return one row for each problem of a file, checked, with a new index and split.

    What is left out or repaired is printed. Of rows that ask the same, the first is kept, if they
    agree on the answer; else none of them.

    Args:
        split: "train" or "test", for `extra_info`.
        sources: the task, and how to make its rows.

    Raises:
        DataError: the file is not readable, or rows are bad. The message names the file, and of the
            first ten bad rows the numbers (from 0) and the fields.
        OSError: the file cannot be opened.
    """
    items: Iterable[Any]
    row_of: Callable[[Any, Callable[[str], None]], Row]
    if path.suffix == ".parquet":
        items, row_of = parquet_rows(path), sources.of_parquet
    elif path.suffix == ".jsonl":
        items, row_of = _lines(path), lambda line, note: sources.row_of(_parsed(*line), note)
    elif path.suffix == ".json":
        items, row_of = _read_json(path), sources.row_of
    else:
        raise DataError(
            f"{path}: got suffix {path.suffix!r}; expected '.json', '.jsonl' or '.parquet'"
        )
    with _printed(path) as notes:

        def made(number: int, item: Any) -> Row:
            row = row_of(item, lambda what: notes[what].append(number))
            source, wanted = row.get("data_source", ""), ("", *sources.task.data_sources)
            require(source in wanted, "data_source", source, " or ".join(map(repr, wanted[1:])))
            return numbered([row], split, sources.dropped)[0]

        numbers, rows = _found(enumerate(progress(items, f"reading {path}")), path, made, notes)
        if sources.mend is not None:
            numbers, rows = _mended(zip(numbers, rows, strict=True), path, sources.mend, notes)
        kept = np.ones(len(rows), bool)
        for what, places in repetitions(rows, sources.task).items():
            notes[f"left out ({what})"] = [numbers[place] for place in sorted(places)]
            kept[places] = False
    return PickedRows(rows, np.flatnonzero(kept), split)


@contextmanager
def _printed(path: Path) -> Iterator[Notes]:
    """Print on stderr what is noted, also if an error follows."""
    notes: Notes = defaultdict(list)
    try:
        yield notes
    finally:
        for what, numbers in notes.items():
            *rows, more = [*islice(dict.fromkeys(numbers), SHOWN + 1), ""][: SHOWN + 1]
            shown = ", ".join(map(str, rows)) + (", ..." if more != "" else "")
            print(f"{path}: {len(numbers):,} x {what}: row {shown}", file=sys.stderr)


def _found(
    items: Iterable[tuple[int, Any]], path: Path, row_of: Callable[[int, Any], Row], notes: Notes
) -> tuple[Sequence[int], PackedRows]:
    """The numbers of the rows that are not left out, and these rows, checked."""

    def unless_left_out(number: int, item: Any) -> Row | None:
        try:
            return row_of(number, item)
        except LeftOut as why:
            notes[f"left out ({why})"].append(number)
            return None

    numbers, rows = array("q"), PackedRows()
    for number, row in checked(items, str(path), unless_left_out):
        numbers.append(number)
        rows.append(row)
    return numbers, rows


def _mended(
    items: Iterator[tuple[int, Row]], path: Path, mend: Mend, notes: Notes
) -> tuple[Sequence[int], PackedRows]:
    """The rows with the ground truths that `mend` makes of theirs."""

    def start(item: tuple[int, Row]) -> tuple[int, tuple[Row, Future[tuple[str, str]]]]:
        number, row = item
        return number, (row, pool.submit(mend, row["reward_model"]["ground_truth"]))

    def mended(number: int, item: tuple[Row, Future[tuple[str, str]]]) -> Row:
        row, tried = item
        try:
            truth, what = tried.result()
        except ValueError as error:
            raise ValueError(f"field reward_model.ground_truth: {error}") from error
        if what:
            notes[f"repaired ({what})"].append(number)
        return {**row, "reward_model": {**row["reward_model"], "ground_truth": truth}}

    pool = ThreadPoolExecutor()
    try:
        # in parts, because a pool holds all that waits
        parts = iter(lambda: [*map(start, islice(items, ROWS_AT_ONCE))], [])
        tried = progress(chain.from_iterable(parts), f"trying the answers of {path}")
        return _found(tried, path, mended, notes)
    finally:
        pool.shutdown(cancel_futures=True)


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


def seeded(name: str, row_of: Callable[[Random, str], Row]) -> Callable[..., Iterator[Row]]:
    """Return `make_rows(count, *, split, seed)`, whose row i depends on i, split and seed alone.

    Args:
        row_of: makes a row of the split "train" or "test" out of random numbers.
    """

    def make_rows(count: int, *, split: str, seed: int) -> Iterator[Row]:
        # a string seeds Random through SHA-512: the same in every process, unlike hash()
        seeds = (f"verl-gdpo {name} {split} {seed} {index}" for index in range(count))
        return (row_of(Random(text), split) for text in seeds)

    return make_rows


def numbered(rows: Iterable[Row], split: str, dropped: Sequence[str] = ()) -> list[Row]:
    """Return the rows with index and split in `extra_info`, and without its `dropped` keys."""

    def placed(row: Row, index: int) -> Row:
        extra = row.get("extra_info") or {}
        if not isinstance(extra, Mapping):
            return row  # which is refused
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
    parts = {"train": order[:-test_count], "test": order[-test_count:]}
    return {split: PickedRows(rows, part, split) for split, part in parts.items()}


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that hold something, with their numbers from 1."""
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))  # with a BOM or without
    try:
        with path.open(encoding=encoding, newline="\n") as lines:
            yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    except UnicodeError as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error


def _parsed(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = str(error).partition(": line 1 ")[0]
        raise ValueError(f"got no readable JSON ({reason}, in line {number})") from error


def _read_json(path: Path) -> list[Any]:
    try:
        content = path.read_bytes()
        items = json.loads(content.decode(json.detect_encoding(content)))  # with a BOM or without
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: got a JSON {type(items).__name__}; expected a list of objects")
    return items
