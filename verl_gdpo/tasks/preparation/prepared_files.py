"""Writes and reads parquet files of rows, and knows those that the same arguments have made.

Each file holds a hash of what it was made from, and one of its rows. By the second, a file is known
that somebody has changed.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo.atomic import replace_together
from verl_gdpo.tasks import Task
from verl_gdpo.tasks.preparation import DataError, progress
from verl_gdpo.tasks.preparation.schema import SCHEMA, Row, checked

CODE = Path(__file__).parent
# Keys in a file's metadata.
MADE_FROM = b"verl_gdpo.made_from"
CONTENT = b"verl_gdpo.content"
OPTIONS = b"verl_gdpo.options"
ROWS_PER_GROUP = 8192  # Written at once: few enough for memory, and for Arrow's limit of 2 GB.
ROWS_AT_ONCE = 1024  # Read at once.
# pandas keeps the old numbers of filtered or shuffled rows in such a column, which nobody wrote.
INDEX_OF_PANDAS = re.compile(r"__index_level_\d+__")


def _content_id(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """A hash of rows, by which an edited file is known."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True).encode())
    return digest.hexdigest().encode()


def write_parquets(
    files: Mapping[Path, Sequence[Mapping[str, Any]]], made_from: str = "", options: str = ""
) -> None:
    """Check all rows, then write all files or none. Existing files are replaced.

    The same rows and the same version of pyarrow give the same bytes.

    Args:
        files: {path: rows}.
        made_from, options: texts that are stored in the metadata of each file.

    Raises:
        DataError: a row is refused; see `checked`.
        OSError: a file cannot be written; all files stay as they were.
    """
    ids = {}
    for path, rows in files.items():
        numbered = enumerate(progress(rows, f"checking {path}"))
        ids[path] = _content_id(row for _, row in checked(numbered, str(path)))
    with replace_together(*files) as temporary:
        for target, (path, rows) in zip(temporary, files.items(), strict=True):
            metadata = {MADE_FROM: made_from, CONTENT: ids[path], OPTIONS: options}
            described = SCHEMA.with_metadata(metadata)
            _write_rows(target, progress(rows, f"writing {path}"), described)


def _write_rows(target: Path, rows: Iterator[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write the rows group by group, so that one group at a time is in memory."""
    with pq.ParquetWriter(target, schema) as writer:
        while True:
            group = list(islice(rows, ROWS_PER_GROUP))
            if not group:
                return
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def parquet_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file without checking them, and without an index of pandas.

    Raises:
        DataError: the file is not a parquet file, or is damaged.
        OSError: the file cannot be opened.
    """
    with path.open("rb") as file:
        try:
            parquet = pq.ParquetFile(file)
            names = parquet.schema_arrow.names
            columns = [name for name in names if not INDEX_OF_PANDAS.fullmatch(name)]
            for batch in parquet.iter_batches(ROWS_AT_ONCE):
                yield from batch.select(columns).to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path}: got no readable parquet file ({error})") from error


def git_blob_id(content: bytes) -> str:
    """Return the id that `git hash-object` prints of a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def made_from(task: Task, options: Mapping[str, Any]) -> str:
    """Return a hash of the code and the options that determine rows; files count by content."""
    digest = hashlib.sha256()
    for path in _code(task):
        digest.update(path.read_bytes())
    digest.update(json.dumps(options, sort_keys=True, default=_file_id).encode())
    return digest.hexdigest()


def _file_id(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()


def _code(task: Task) -> list[Path]:
    """The files that determine a task's rows: of this folder, of the scorer, of their own module.

    Those beside the scorer are there too: all of them in a folder that has the task's name, else
    those whose names begin with it.
    """
    scorer = _file_of(task.score.__module__)
    beside = "*" if scorer.parent.name == task.name else f"{task.name}*"
    files = {scorer}
    files.update(CODE.glob("*.py"))
    files.update(scorer.parent.glob(beside))
    if task.rows:
        files.add(_file_of(task.rows))
    return sorted(path for path in files if path.suffix in (".py", ".json"))


def _file_of(module: str) -> Path:
    return Path(str(sys.modules[module].__file__))


def is_there(paths: Sequence[Path], wanted: str) -> bool:
    """Return whether all files exist as they were made from `wanted`."""
    for path in paths:
        if _metadata(path).get(MADE_FROM) != wanted.encode():
            return False
    # The metadata come first, because this reads all rows.
    return not any(_foreign(path) for path in paths)


def recorded_options(paths: Sequence[Path]) -> str | None:
    """Return the options that made all files; None if they differ, or somebody changed a file."""
    options = [_metadata(path).get(OPTIONS) for path in paths]
    first = options[0]
    if any(other != first for other in options):
        return None
    if any(_foreign(path) for path in paths):
        return None
    if first is None:
        return None
    return first.decode()


def refuse_to_replace(paths: Sequence[Path]) -> None:
    """Raise DataError for a link, and for a file that is not as data_prep wrote it."""
    for path in paths:
        why = ""
        if path.is_symlink():
            why = "it is a link"
        elif path.is_file():
            why = _foreign(path)
        if why:
            raise DataError(
                f"{path} is left as it is: {why}. Replace it with --force, or train on it with "
                "data.train_files=FILE data.val_files=FILE"
            )


def _foreign(path: Path) -> str:
    """Why a file is not as data_prep wrote it; "" if it is."""
    content = _metadata(path).get(CONTENT)
    if content is None:
        return "it cannot be read, or data_prep did not write it"
    if content != _content_id(parquet_rows(path)):
        return "it was changed after data_prep wrote it"
    return ""


def _metadata(path: Path) -> dict[bytes, bytes]:
    """What the metadata of a file say; nothing, if they cannot be read."""
    try:
        return pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError):
        return {}
