"""Reads the data files of a run as verl's dataset does; counts its steps and its prompts."""

import codecs
import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.parquet
from omegaconf import ListConfig, OmegaConf

from verl_gdpo.algorithm.settings import SettingsError
from verl_gdpo.hooks.configuration import has_own_scorer, noted, uses_gdpo_manager
from verl_gdpo.tasks import TASK_BY_SOURCE, check_ground_truths
from verl_gdpo.tasks.preparation.overlap import Messages, PromptReader, compare
from verl_gdpo.tasks.preparation.prepared_files import ROWS_AT_ONCE

LARGE_ROW = 16 << 20  # In bytes; a row with a few pictures has less.
# The beginning of a file in which its first character is looked for, and Arrow's usual block.
BEGINNING = 1 << 10
BLOCK = 1 << 20


def _read_json(path: Path) -> pa.Table:
    """Return the rows of a file of JSON Lines, or of one list, as verl's `datasets` reads them.

    Arrow reads lines alone. The rows of a list become lines, because the same texts then have the
    same types: Arrow makes a time of a text that looks like one.

    Raises:
        ValueError: it is no JSON, or its rows are not alike.
        OSError: the file cannot be opened.
    """
    content = path.read_bytes()
    beginning = content[:BEGINNING].removeprefix(codecs.BOM_UTF8).lstrip()
    if beginning.startswith(b"["):
        rows = json.loads(content)
        content = "\n".join(json.dumps(row) for row in rows).encode()
    block_size = BLOCK
    while True:
        options = pa.json.ReadOptions(block_size=block_size)
        try:
            return pa.json.read_json(pa.BufferReader(content), read_options=options)
        except pa.ArrowInvalid as error:
            # A row is longer than a block.
            if "straddling" not in str(error) or block_size >= len(content):
                raise
            block_size *= 2


READERS = {
    ".parquet": pa.parquet.read_table,
    ".json": _read_json,
    ".jsonl": _read_json,
}


@dataclass(frozen=True)
class DataRow:
    label: str  # "row 5 of data/train.parquet"
    source: str
    fields: Mapping[str, Any]
    # Whether it is scored as a row of a validation, which may have functions of its own.
    is_validation: bool = False

    @property
    def truth(self) -> Any:
        return (self.fields.get("reward_model") or {}).get("ground_truth")

    def good_response(self, options: Mapping[str, Any]) -> str:
        """The good response of the row's task, else the ground truth, or "" if it is no text.

        Args:
            options: of the run's scorers.
        """
        if not isinstance(self.truth, str):
            return ""
        task = TASK_BY_SOURCE.get(self.source)
        if task is None:
            return self.truth
        return task.good_response_of(self.truth, options)


@dataclass(frozen=True)
class DataFile:
    path: str
    table: pa.Table

    @property
    def sources(self) -> list[str]:
        """The data source of each row, which is the text None where a row has none, as in a run."""
        return [str(source) for source in self.table["data_source"].to_pylist()]

    def row(self, index: int) -> DataRow:
        (fields,) = self.table.slice(index, 1).to_pylist()
        return DataRow(f"row {index} of {self.path}", str(fields["data_source"]), fields)


# (its row, None if it is tried on each row; a response)
Responses = Sequence[tuple[DataRow | None, str]]


def read_files(config: Any, key: str) -> list[DataFile]:
    """Return the files of `data.<key>` after checking them.

    There are none if only verl can read them: a path is a URL, or a dataset class is set.

    Raises:
        SettingsError: for each file that does not exist, is not readable, lacks a column, or has a
            row that our scorer cannot use, what is wrong with it.
    """
    files = config.data[key]
    if not files:
        raise ValueError(f"data.{key}={files}: verl needs rows for training and for validation")
    if not isinstance(files, list | ListConfig):
        files = [files]
    paths = [str(file) for file in files]
    if OmegaConf.select(config, "data.custom_cls.path") or any("://" in path for path in paths):
        return []
    read = []
    mistakes: list[str] = []
    for path in paths:
        with noted(mistakes):
            read.append(DataFile(path, _read(config, key, path)))
    if mistakes:
        raise SettingsError(mistakes)
    return read


def _read(config: Any, key: str, path: str) -> pa.Table:
    """Return a file's rows.

    Raises:
        SettingsError: it has a mistake, or several.
    """
    where = f"data.{key}: {path}"
    table = _table_of(Path(path).expanduser(), where)
    needed = {config.data.prompt_key, "data_source", "reward_model"}
    absent = sorted(needed - set(table.column_names))
    if absent:
        raise ValueError(f"{where} lacks the columns {absent}; it has {table.column_names}")
    if table.num_rows == 0:
        raise ValueError(f"{where} holds no rows")
    mistakes: list[str] = []
    with noted(mistakes):
        _check_prompts(table, config.data.prompt_key, where)
    with noted(mistakes):
        _check_truths(config, table, where)
    with noted(mistakes):
        _check_extra_info(table, where)
    if mistakes:
        raise SettingsError(mistakes)
    return table


def _table_of(file: Path, where: str) -> pa.Table:
    """Return what a file holds; raise ValueError if it cannot be read."""
    if not file.exists():
        raise ValueError(f"{where}: there is no such file")
    reader = READERS.get(file.suffix)
    if reader is None:
        raise ValueError(f"{where}: expected a file that ends in {', '.join(READERS)}")
    try:
        return reader(file)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{where}: it cannot be read: {error}") from error


def _check_truths(config: Any, table: pa.Table, where: str) -> None:
    """Raise ValueError for ground truths that verl cannot read, or our scorers cannot use."""
    kind = table.schema.field("reward_model").type
    if not pa.types.is_struct(kind):
        raise ValueError(f"{where}: reward_model is {kind}; expected {{ground_truth: ...}}")
    if uses_gdpo_manager(config) and not has_own_scorer(config):
        check_ground_truths(rows_of(table, "data_source", "reward_model"), where)


def _check_extra_info(table: pa.Table, where: str) -> None:
    """Raise ValueError for an `extra_info` that is no dict: verl's dataset calls its `get`."""
    if "extra_info" not in table.column_names:
        return
    kind = table.schema.field("extra_info").type
    # Of an extension, such as JSON, `datasets` makes dicts.
    may_be_dicts = pa.types.is_struct(kind) or isinstance(kind, pa.BaseExtensionType)
    if may_be_dicts or table["extra_info"].null_count == table.num_rows:
        return
    raise ValueError(
        f"{where}: extra_info is {kind}; expected {{index: ..., ...}}. verl reads it as a dict, "
        "and ends at the first row with AttributeError: write a dict, not its JSON text"
    )


def _check_prompts(table: pa.Table, column: str, where: str) -> None:
    """Raise ValueError for a prompt that is no list of messages, with its row."""
    kind = table.schema.field(column).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    has_messages = is_list and pa.types.is_struct(kind.value_type)
    names = set()
    if has_messages:
        names = {field.name for field in kind.value_type}
    if not {"role", "content"} <= names:
        raise ValueError(
            f"{where}: {column} is {kind}; expected a list of {{role: ..., content: ...}}"
        )
    prompts = table[column]
    if prompts.null_count == 0 and pc.list_flatten(prompts).null_count == 0:
        # Arrow counts in milliseconds what a loop over 50,000 rows takes a second for.
        return
    broken = []
    for number, row in enumerate(rows_of(table, column)):
        if row[column] is None or None in row[column]:
            broken.append(number)
    raise ValueError(
        f"{where}: {column} of {len(broken)} of {table.num_rows} rows is null, or has a null in "
        f"the place of a message, such as row {broken[0]}. verl leaves such rows out without a "
        "word, or fails at their turn: take them out, or mend them"
    )


def rows_of(table: pa.Table, *columns: str) -> Iterator[Mapping[str, Any]]:
    for batch in table.select(columns).to_batches(ROWS_AT_ONCE):
        yield from batch.to_pylist()


def shared_prompts(
    config: Any, training: Sequence[DataFile], validation: Sequence[DataFile]
) -> tuple[str, str]:
    """Say how many validation rows have the prompt of a training row, and how many nearly so.

    Either is "" if there are none.
    """
    key = config.data.prompt_key

    def prompts(files: Sequence[DataFile]) -> PromptReader:
        def read(step: int) -> Iterator[Messages]:
            return islice(_column(files, key), 0, None, step)

        return PromptReader(_count_rows(files), read)

    def of_validation(number: int) -> str:
        return row_at(validation, number).label

    def of_training(number: int) -> str:
        return row_at(training, number).label

    shared = compare(prompts(training), prompts(validation))
    return (
        shared.describe_equal(of_validation, of_training),
        shared.describe_near(of_validation, of_training),
    )


def _column(files: Sequence[DataFile], name: str) -> Iterator[Any]:
    """Yield the values of a column in all files, one after the other."""
    for file in files:
        for row in rows_of(file.table, name):
            yield row[name]


def _count_rows(files: Sequence[DataFile]) -> int:
    return sum(file.table.num_rows for file in files)


def row_at(files: Sequence[DataFile], number: int) -> DataRow:
    """Return a row by its number in all files, one after the other."""
    for file in files:
        if number < file.table.num_rows:
            return file.row(number)
        number -= file.table.num_rows
    raise IndexError(number)


def hardly_useful_rows(config: Any, key: str, files: Sequence[DataFile]) -> list[str]:
    """A remark on each file of `data.<key>` with equal or empty prompts, or rows that lack much."""
    remarks = []
    column = config.data.prompt_key
    for file in files:
        # Numbers take less memory than the texts.
        hashes = []
        is_empty = []
        has_no_truth = []
        has_no_source = []
        for row in rows_of(file.table, column, "reward_model", "data_source"):
            # The system message counts too: tools may stand in it, and differ.
            hashes.append(hash(str(row[column])))
            asked = (part["content"] for part in row[column] if part["role"] != "system")
            is_empty.append(not any(str(content or "").strip() for content in asked))
            truth = (row["reward_model"] or {}).get("ground_truth")
            has_no_truth.append(truth in (None, "", []))
            has_no_source.append(row["data_source"] is None)
        table = {
            "prompts are the same as an earlier one": pd.Series(hashes).duplicated(),
            "prompts are empty": is_empty,
            "rows have no ground truth": has_no_truth,
            "rows have no data_source": has_no_source,
        }
        for what, flags in table.items():
            places = np.flatnonzero(flags)
            if len(places) > 0:
                first = file.row(int(places[0]))
                remarks.append(
                    f"data.{key}: {len(places)} of {len(hashes)} {what}, such as {first.label}"
                )
    return remarks


def large_rows(key: str, files: Sequence[DataFile]) -> list[str]:
    """A remark on each file of `data.<key>` with rows of more than `LARGE_ROW` bytes.

    verl copies a row for each of its responses, and sends each copy through Ray.
    """
    remarks = []
    for file in files:
        sizes = _sizes_of_large_rows(file.table)
        if sizes:
            largest = max(sizes, key=lambda number: sizes[number])
            remarks.append(
                f"data.{key}: {len(sizes)} of {file.table.num_rows} rows have more than "
                f"{LARGE_ROW >> 20} MB, such as {file.row(largest).label} with "
                f"{sizes[largest] / (1 << 20):,.0f} MB. verl sends a copy of its row with each "
                "response: keep in a file of its own what no scorer needs"
            )
    return remarks


def _sizes_of_large_rows(table: pa.Table) -> dict[int, int]:
    """Return {number of the row: bytes} of the rows above `LARGE_ROW`."""
    sizes = {}
    first = 0
    for batch in table.to_batches(ROWS_AT_ONCE):
        if batch.nbytes > LARGE_ROW:
            for number in range(batch.num_rows):
                size = batch.slice(number, 1).nbytes
                if size > LARGE_ROW:
                    sizes[first + number] = size
        first += batch.num_rows
    return sizes


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` places, at equal distances, with both ends."""
    return [int(place) for place in np.linspace(0, count - 1, min(count, most)).round()]


def pick_rows(
    training: Sequence[DataFile], validation: Sequence[DataFile], count: int
) -> list[DataRow]:
    """Return `count` evenly spread training rows, and one row of each other data source."""
    total = _count_rows(training)
    rows = [row_at(training, number) for number in evenly(total, count)]
    for file in chain(training, validation):
        sources = file.sources
        for source in dict.fromkeys(sources):
            if source not in [row.source for row in rows]:
                rows.append(file.row(sources.index(source)))
    return rows


def rows_with_other_fields(
    training: Sequence[DataFile], validation: Sequence[DataFile]
) -> list[DataRow]:
    """Return a row of each data source of the validation files with other fields than training."""
    schemas = [file.table.schema for file in training]
    rows = []
    for file in validation:
        if file.table.schema in schemas:
            continue
        sources = file.sources
        for source in dict.fromkeys(sources):
            rows.append(file.row(sources.index(source)))
    return rows


def read_responses(path: Path, training: Sequence[DataFile]) -> Responses:
    """Return (the training row, None if the line names none; the response) of each line of a file.

    Raises:
        ValueError: the file cannot be read, or a line is not {response: text, row: number of a
            training row, or nothing}.
    """
    table = _table_of(path, f"--responses {path}")
    total = _count_rows(training)
    responses: list[tuple[DataRow | None, str]] = []
    for line in table.to_pylist():
        text = line.get("response")
        number = line.get("row")
        is_of_row = number is not None
        if not isinstance(text, str) or (is_of_row and not _is_row_number(number, total)):
            form = f"{{response: text}}, and row: 0 to {total - 1} if it belongs to a row"
            raise ValueError(f"--responses {path}: got {reprlib.repr(line)}; expected {form}")
        row = None
        if is_of_row:
            row = row_at(training, int(number))
        responses.append((row, text))
    return responses


def _is_row_number(number: Any, total: int) -> bool:
    """Return whether a value is the number of one of `total` rows.

    pandas stores the whole numbers of a column as floats if a value is missing.
    """
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return number in range(total)
