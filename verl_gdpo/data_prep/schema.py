"""Checks, writes and reads parquet rows, which have the same columns for every task.

    {"data_source": "rlla",              # selects the scorer, see verl_gdpo.rewards.TASK_OF
     "prompt": [{"role": "system", "content": "You are a helpful multi-turn ..."},
                {"role": "user", "content": "**Dialogue Records History** ..."}],
     "ability": "math",                  # a column of verl that nothing reads
     "reward_model": {"style": "rule", "ground_truth": "<think> ... </think> ..."},
     "extra_info": {"index": 0, "split": "train"}}    # index: row number in the file, from 0

The same columns allow verl to train on several tasks at once.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo.atomic import replace_together
from verl_gdpo.data_prep import DataError
from verl_gdpo.data_prep.progress import Progress
from verl_gdpo.rewards import TASK_OF

Row = dict[str, Any]
Splits = dict[str, list[Row]]  # "train" and "test" -> rows

SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("index", pa.int64()), ("split", pa.string())])),
    ]
)
# keys in a file's metadata, see `made_from.py`
MADE_FROM, CONTENT = b"verl_gdpo.made_from", b"verl_gdpo.content"
ROW_TYPE = pa.struct(list(SCHEMA))
ROLES = ("system", "user", "assistant")
ROWS_PER_GROUP = 8192  # limits memory, and keeps each column below Arrow's limit of 2 GB
ROWS_AT_ONCE = 1024  # that are read


def check_rows(
    rows: Sequence[Mapping[str, Any]], where: str, numbers: Sequence[int] | None = None
) -> None:
    """Refuse rows on which verl or a scorer would fail.

    Args:
        rows: any values; they are checked completely.
        where: name of the rows in the message, such as the file's path.
        numbers: the number of each row in the message; by default its place, from 0.

    Raises:
        DataError: a row is bad. The message names `where`, the row, the field, the value and what
            was expected.
    """
    if not rows:
        raise DataError(f"{where}: got no rows; expected at least one")
    progress = Progress(f"checking {where}", len(rows), "rows")
    for done, (number, row) in enumerate(zip(numbers or range(len(rows)), rows, strict=True)):
        progress.at(done)
        try:
            _check_type(row, ROW_TYPE, "")
            _check_prompt(row["prompt"])
            _check_ground_truth(row["data_source"], row["reward_model"]["ground_truth"])
        except ValueError as error:
            raise DataError(f"{where}, row {number}, {error}") from error


def _check_type(value: Any, expected: pa.DataType, field: str) -> None:
    """Raise ValueError if the Arrow type cannot hold a field's value unchanged."""
    if pa.types.is_struct(expected):
        _require(isinstance(value, Mapping), field, value, "an object")
        prefix = f"{field}." if field else ""
        names = [expected.field(i).name for i in range(expected.num_fields)]
        for name in value:
            if name not in names:
                raise ValueError(f"field {prefix}{name}: unknown; expected only {names}, remove it")
        for name in names:
            if name not in value:
                raise ValueError(f"field {prefix}{name}: missing")
            _check_type(value[name], expected.field(name).type, f"{prefix}{name}")
    elif pa.types.is_list(expected):
        _require(isinstance(value, list), field, value, "a list")
        for i, item in enumerate(value):
            _check_type(item, expected.value_type, f"{field}[{i}]")
    elif pa.types.is_int64(expected):
        # a bool is an int in Python, and would be read back from the file as an int
        is_index = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        _require(is_index, field, value, "an int in [0, 2**63)")
    else:
        _require(isinstance(value, str), field, value, "a str")
        try:
            value.encode()  # parquet and tokenizers cannot hold half a surrogate pair; JSON can
        except UnicodeEncodeError:
            _require(False, field, value, "valid Unicode")


def _check_prompt(prompt: list[dict[str, str]]) -> None:
    """Raise ValueError for messages that chat templates refuse, or that ask nothing."""
    _require(bool(prompt), "prompt", prompt, "at least one message")
    for i, message in enumerate(prompt):
        role = message["role"]
        _require(role in ROLES, f"prompt[{i}].role", role, f"one of {ROLES}")
        _require(
            i == 0 or role != "system", f"prompt[{i}].role", role, "'system' only as the first"
        )
    last = len(prompt) - 1
    _require(prompt[last]["role"] == "user", f"prompt[{last}].role", prompt[last]["role"], "'user'")
    question = prompt[last]["content"]
    _require(bool(question.strip()), f"prompt[{last}].content", question, "some text")


def _check_ground_truth(data_source: str, ground_truth: str) -> None:
    """Raise ValueError if no scorer takes the row, or if its scorer refuses the ground truth."""
    _require(data_source in TASK_OF, "data_source", data_source, f"one of {sorted(TASK_OF)}")
    field = "reward_model.ground_truth"
    _require(bool(ground_truth.strip()), field, ground_truth, "some text")
    try:
        TASK_OF[data_source].check_ground_truth(ground_truth)
    except (TypeError, ValueError) as error:
        raise ValueError(f"field {field}: {error}") from error


def _require(is_good: bool, field: str, value: Any, expected: str) -> None:
    if not is_good:
        place = f"field {field}" if field else "the whole row"
        raise ValueError(f"{place}: got {repr(value)[:80]}; expected {expected}")


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one file; see `write_parquets`."""
    write_parquets({path: rows})


def content_id(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A hash of rows, by which an edited file is known."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest().encode()


def write_parquets(files: Mapping[Path, Sequence[Mapping[str, Any]]], made_from: str = "") -> None:
    """Check all rows, then write all files or none. Existing files are replaced.

    The same rows and the same version of pyarrow give the same bytes.

    Args:
        files: {path: rows}.
        made_from: text that is stored in the metadata of each file.

    Raises:
        DataError: a row is refused; see `check_rows`.
        OSError: a file cannot be written; all files stay as they were.
    """
    for path, rows in files.items():
        check_rows(rows, str(path))
    with replace_together(*files) as temporary:
        for target, path, rows in zip(temporary, files, files.values(), strict=True):
            progress = Progress(f"writing {path}", len(rows), "rows")
            described = SCHEMA.with_metadata({MADE_FROM: made_from, CONTENT: content_id(rows)})
            with pq.ParquetWriter(target, described) as writer:
                for start in range(0, len(rows), ROWS_PER_GROUP):
                    progress.at(start)
                    group = list(rows[start : start + ROWS_PER_GROUP])
                    writer.write_table(pa.Table.from_pylist(group, schema=described))


def read_parquet(path: Path) -> list[Row]:
    """Return the rows that `parquet_rows` yields."""
    return list(parquet_rows(path))


def parquet_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file without checking them.

    Raises:
        DataError: the file is not a parquet file, or is damaged.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            for batch in pq.ParquetFile(file).iter_batches(ROWS_AT_ONCE):
                yield from batch.to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: got no readable parquet file ({error})") from error
