"""Writes and reads parquet files of rows, and knows those that the same arguments have made.

Each file holds a hash of what it was made from, and one of its rows. By the second, a file is known
that somebody has changed.
"""

import hashlib
import json
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
# keys in a file's metadata
MADE_FROM, CONTENT = b"verl_gdpo.made_from", b"verl_gdpo.content"
OPTIONS = b"verl_gdpo.options"
ROWS_PER_GROUP = 8192  # limits memory, and keeps each column below Arrow's limit of 2 GB
ROWS_AT_ONCE = 1024  # that are read


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
    ids = {
        path: _content_id(row for _, row in checked(enumerate(looked_at), str(path)))
        for path, rows in files.items()
        for looked_at in [progress(rows, f"checking {path}")]
    }
    with replace_together(*files) as temporary:
        for target, (path, rows) in zip(temporary, files.items(), strict=True):
            metadata = {MADE_FROM: made_from, CONTENT: ids[path], OPTIONS: options}
            described = SCHEMA.with_metadata(metadata)
            unwritten = progress(rows, f"writing {path}")
            with pq.ParquetWriter(target, described) as writer:
                while group := [*islice(unwritten, ROWS_PER_GROUP)]:
                    writer.write_table(pa.Table.from_pylist(group, schema=described))


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
    modules = [task.score.__module__, *filter(None, [task.rows])]
    scorer, *rows = [Path(str(sys.modules[name].__file__)) for name in modules]
    beside = "*" if scorer.parent.name == task.name else f"{task.name}*"
    files = {*CODE.glob("*.py"), *scorer.parent.glob(beside), scorer, *rows}
    return sorted(path for path in files if path.suffix in (".py", ".json"))


def is_there(paths: Sequence[Path], wanted: str) -> bool:
    """Return whether all files exist as they were made from `wanted`."""
    are_made = all(_metadata(path).get(MADE_FROM) == wanted.encode() for path in paths)
    return are_made and not any(map(_foreign, paths))


def recorded_options(paths: Sequence[Path]) -> str | None:
    """Return the options that made all files; None if they differ, or somebody changed a file."""
    first, *others = (_metadata(path).get(OPTIONS) for path in paths)
    is_one = all(other == first for other in others) and not any(map(_foreign, paths))
    return first.decode() if first is not None and is_one else None


def refuse_to_replace(paths: Sequence[Path]) -> None:
    """Raise DataError for a link, and for a file that is not as data_prep wrote it."""
    for path in paths:
        why = "it is a link" if path.is_symlink() else path.is_file() and _foreign(path)
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
    is_same = content == _content_id(parquet_rows(path))
    return "" if is_same else "it was changed after data_prep wrote it"


def _metadata(path: Path) -> dict[bytes, bytes]:
    """What the metadata of a file say; nothing, if they cannot be read."""
    try:
        return pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError):
        return {}
