"""Reads the rows of a task from files on this machine, one row for each problem.

The rows of a file take little memory: one of GSM8K takes 170 bytes, and as objects 3 kB.
"""

import json
import zlib
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.tasks.preparation import DataError, LeftOut, progress
from verl_gdpo.tasks.preparation.parquet import ROWS_AT_ONCE, parquet_rows
from verl_gdpo.tasks.preparation.schema import Row, Splits, checked, repetitions, require
from verl_gdpo.tasks.preparation.sources import Mend, Sources
from verl_gdpo.terminal import note

SPLIT_SEED, TEST_SHARE = 31415, 0.02  # as in ToolRL
SHOWN = 20  # numbers of rows that are left out or repaired
Notes = dict[str, list[int]]  # what happened -> to which rows


class PackedRows(Sequence[Row]):
    """Rows that are unpacked one by one, as JSON gives them back."""

    def __init__(self) -> None:
        self._packed, self._ends = bytearray(), array("q", [0])
        self._first = b""  # what others share with it, such as a system prompt, takes no room

    def append(self, row: Row) -> None:
        text = json.dumps(row).encode()
        self._first = self._first or text
        packer = zlib.compressobj(1, zdict=self._first)
        self._packed += packer.compress(text) + packer.flush()
        self._ends.append(len(self._packed))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        packed = self._packed[self._ends[index] : self._ends[index + 1]]
        return json.loads(zlib.decompressobj(zdict=self._first).decompress(packed))


class PickedRows(Sequence[Row]):
    """Some of the rows in another order, with their new index and split in `extra_info`."""

    def __init__(self, rows: Sequence[Row], places: npt.NDArray[np.int64], split: str) -> None:
        self._rows, self._places, self._split = rows, places, split

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[int(self._places[index])]
        return {**row, "extra_info": {**row["extra_info"], "index": index, "split": self._split}}


def read_rows(path: Path, split: str, sources: Sources) -> Sequence[Row]:
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
    if path.suffix == ".parquet":
        items = parquet_rows(path)
    elif path.suffix == ".jsonl":
        items = _lines(path)
    elif path.suffix == ".json":
        items = _read_json(path)
    else:
        raise DataError(
            f"{path}: got suffix {path.suffix!r}; expected '.json', '.jsonl' or '.parquet'"
        )
    with _printed(path) as notes:

        def made(number: int, item: Any) -> Row:
            value = item
            if path.suffix == ".jsonl":  # a line is parsed here, so that a bad one is a bad row
                value = _parsed(*item)
            row = sources.row(value, lambda what: notes[what].append(number))
            source, wanted = row.get("data_source", ""), ("", *sources.task.data_sources)
            require(source in wanted, "data_source", source, " or ".join(map(repr, wanted[1:])))
            return placed(row, 0, split, sources.dropped)

        numbers, rows = _found(enumerate(progress(items, f"reading {path}")), path, made, notes)
        if sources.mend is not None:
            found = zip(numbers, rows, strict=True)
            numbers, rows = _mended(found, len(rows), path, sources.mend, notes)
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
            note(f"{path}: {len(numbers):,} x {what}: row {shown}")


def _found(
    items: Iterable[tuple[int, Any]], path: Path, row_of: Callable[[int, Any], Row], notes: Notes
) -> tuple[Sequence[int], PackedRows]:
    """The numbers of the rows that are not left out, and these rows, checked."""

    def leave_out(number: int, why: LeftOut) -> None:
        notes[f"left out ({why})"].append(number)

    numbers, rows = array("q"), PackedRows()
    for number, row in checked(items, str(path), row_of, leave_out):
        numbers.append(number)
        rows.append(row)
    return numbers, rows


def _mended(
    items: Iterator[tuple[int, Row]], count: int, path: Path, mend: Mend, notes: Notes
) -> tuple[Sequence[int], PackedRows]:
    """The `count` rows with the ground truths that `mend` makes of theirs."""

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
        what = f"trying the answers of {path}"
        tried = progress(chain.from_iterable(parts), what, total=count)
        return _found(tried, path, mended, notes)
    finally:
        pool.shutdown(cancel_futures=True)


def placed(row: Row, index: int, split: str, dropped: Sequence[str] = ()) -> Row:
    """Return a row with index and split in `extra_info`, and without its `dropped` keys."""
    extra = row.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        return row  # which is refused
    kept = {key: value for key, value in extra.items() if key not in dropped}
    return {**row, "extra_info": {**kept, "index": index, "split": split}}


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
            "rows. Expected at least 50 rows, or a file with the test rows: --test FILE"
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
