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
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from verl_gdpo.tasks.preparation import DataError, LeftOut, progress
from verl_gdpo.tasks.preparation.prepared_files import ROWS_AT_ONCE, parquet_rows
from verl_gdpo.tasks.preparation.schema import Row, Splits, checked, repetitions, require
from verl_gdpo.tasks.preparation.sources import Mend, Sources
from verl_gdpo.terminal import note

# Both are ToolRL's.
SPLIT_SEED = 31415
TEST_SHARE = 0.02
SHOWN = 20  # So many numbers of rows that are left out or repaired are printed.
Notes = dict[str, list[int]]  # what happened -> to which rows


class PackedRows(Sequence[Row]):
    """Rows that are unpacked one by one, as JSON gives them back."""

    def __init__(self) -> None:
        self._packed = bytearray()
        self._ends = array("q", [0])  # Row i is packed between the ends i and i + 1.
        self._first = b""  # What others share with it, such as a system prompt, takes no room.

    def append(self, row: Row) -> None:
        text = json.dumps(row).encode()
        if not self._first:
            self._first = text
        packer = zlib.compressobj(1, zdict=self._first)
        self._packed += packer.compress(text)
        self._packed += packer.flush()
        self._ends.append(len(self._packed))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        packed = self._packed[self._ends[index] : self._ends[index + 1]]
        unpacker = zlib.decompressobj(zdict=self._first)
        return json.loads(unpacker.decompress(packed))


class PickedRows(Sequence[Row]):
    """Some of the rows in another order, with their new index and split in `extra_info`."""

    def __init__(self, rows: Sequence[Row], places: npt.NDArray[np.int64], split: str) -> None:
        self._rows = rows
        self._places = places
        self._split = split

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        row = self._rows[int(self._places[index])]
        extra_info = row["extra_info"] | {"index": index, "split": self._split}
        return row | {"extra_info": extra_info}


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
    items = items_of(path)
    own_sources = sources.task.data_sources
    with _printed(path) as notes:

        def made(number: int, item: Any) -> Row:
            # A line is parsed here, so that a bad one is a bad row.
            row = sources.row(parsed(item), lambda what: notes[what].append(number))
            source = row.get("data_source", "")
            expected = " or ".join(repr(own) for own in own_sources)
            require(source == "" or source in own_sources, "data_source", source, expected)
            return placed(row, 0, split, sources.dropped)

        numbered = enumerate(progress(items, f"reading {path}"))
        numbers, rows = _found(numbered, path, made, notes)
        if sources.mend is not None:
            found = zip(numbers, rows, strict=True)
            numbers, rows = _mended(found, len(rows), path, sources.mend, notes)
        kept = np.ones(len(rows), bool)
        for what, places in repetitions(rows, sources.task).items():
            notes[f"left out ({what})"] = [numbers[place] for place in sorted(places)]
            kept[places] = False
    return PickedRows(rows, np.flatnonzero(kept), split)


def items_of(path: Path) -> Iterable[Any]:
    """Return what a file has for each row; see `parsed`.

    Raises:
        DataError: the file is not readable, or its name has another suffix.
        OSError: the file cannot be opened.
    """
    if path.suffix == ".parquet":
        return parquet_rows(path)
    if path.suffix == ".jsonl":
        return _lines(path)
    if path.suffix == ".json":
        return _read_json(path)
    raise DataError(f"{path}: got suffix {path.suffix!r}; expected '.json', '.jsonl' or '.parquet'")


def parsed(item: Any) -> Any:
    """Return an item of a file as an object: a line of a *.jsonl file is not parsed yet.

    Raises:
        ValueError: the line is no JSON.
    """
    if isinstance(item, _Line):
        return item.parsed()
    return item


@contextmanager
def _printed(path: Path) -> Iterator[Notes]:
    """Print on stderr what is noted, also if an error follows."""
    notes: Notes = defaultdict(list)
    try:
        yield notes
    finally:
        for what, numbers in notes.items():
            # A row may have been noted more than once, such as for several of its tests.
            rows = list(dict.fromkeys(numbers))
            shown = ", ".join(str(row) for row in rows[:SHOWN])
            if len(rows) > SHOWN:
                shown += ", ..."
            note(f"{path}: {len(numbers):,} x {what}: row {shown}")


def _found(
    items: Iterable[tuple[int, Any]], path: Path, row_of: Callable[[int, Any], Row], notes: Notes
) -> tuple[Sequence[int], PackedRows]:
    """The numbers of the rows that are not left out, and these rows, checked."""

    def leave_out(number: int, why: LeftOut) -> None:
        notes[f"left out ({why})"].append(number)

    numbers = array("q")
    rows = PackedRows()
    for number, row in checked(items, str(path), row_of, leave_out):
        numbers.append(number)
        rows.append(row)
    return numbers, rows


class _Tried(NamedTuple):
    """A row, and what `mend` makes of its ground truth in a thread."""

    row: Row
    mended: "Future[tuple[str, str]]"


def _mended(
    items: Iterator[tuple[int, Row]], count: int, path: Path, mend: Mend, notes: Notes
) -> tuple[Sequence[int], PackedRows]:
    """The `count` rows with the ground truths that `mend` makes of theirs."""

    def tried() -> Iterator[tuple[int, _Tried]]:
        # They are tried in parts, because a pool holds all that waits.
        while True:
            part = []
            for number, row in islice(items, ROWS_AT_ONCE):
                future = pool.submit(mend, row["reward_model"]["ground_truth"])
                part.append((number, _Tried(row, future)))
            if not part:
                return
            yield from part

    def mended(number: int, item: _Tried) -> Row:
        try:
            truth, what = item.mended.result()
        except ValueError as error:
            raise ValueError(f"field reward_model.ground_truth: {error}") from error
        if what:
            notes[f"repaired ({what})"].append(number)
        reward_model = item.row["reward_model"] | {"ground_truth": truth}
        return item.row | {"reward_model": reward_model}

    pool = ThreadPoolExecutor()
    try:
        numbered = progress(tried(), f"trying the answers of {path}", total=count)
        return _found(numbered, path, mended, notes)
    finally:
        pool.shutdown(cancel_futures=True)


def placed(row: Row, index: int, split: str, dropped: Sequence[str] = ()) -> Row:
    """Return a row with index and split in `extra_info`, and without its `dropped` keys."""
    extra = row.get("extra_info") or {}
    if not isinstance(extra, Mapping):
        # The row is refused when it is checked.
        return row
    kept = {key: value for key, value in extra.items() if key not in dropped}
    kept["index"] = index
    kept["split"] = split
    return row | {"extra_info": kept}


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


class _Line(NamedTuple):
    """A line of a *.jsonl file, with its number from 1."""

    number: int
    text: str

    def parsed(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError) as error:
            # The message counts lines within this text, where there is only one.
            reason, _, _ = str(error).partition(": line 1 ")
            raise ValueError(f"got no readable JSON ({reason}, in line {self.number})") from error


def _lines(path: Path) -> Iterator[_Line]:
    """The lines that hold something."""
    with path.open("rb") as file:
        encoding = json.detect_encoding(file.read(4))  # With a BOM or without.
    try:
        with path.open(encoding=encoding, newline="\n") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    yield _Line(number, text)
    except UnicodeError as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error


def _read_json(path: Path) -> Iterable[Any]:
    """Return the rows of a list, or of JSON Lines, which others keep under this suffix too."""
    try:
        content = path.read_bytes()
        encoding = json.detect_encoding(content)  # With a BOM or without.
        items = json.loads(content.decode(encoding))
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            # One object stands behind another.
            return _lines(path)
        raise DataError(f"{path}: got no readable JSON ({error})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: got a JSON {type(items).__name__}; expected a list of objects")
    return items
