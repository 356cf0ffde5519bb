"""Finds out whether files exist that the same arguments and the same code have made.

Each parquet file holds a hash of what it was made from, and one of its rows. By the second, a file
is known that somebody has changed.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo import rewards
from verl_gdpo.data_prep import DataError, local_files, problems, schema, sources
from verl_gdpo.data_prep.download import git_blob_id


def made_from(task: str, options: Mapping[str, Any]) -> str:
    """Return a hash of the code and the options that determine rows; files count by content."""
    digest = hashlib.sha256()
    for path in _code(task):
        digest.update(path.read_bytes())
    contents = {
        name: git_blob_id(value) if isinstance(value, Path) else value
        for name, value in options.items()
    }
    digest.update(json.dumps(contents, sort_keys=True).encode())
    return digest.hexdigest()


def _code(task: str) -> list[Path]:
    """Return the code files of a task: their names begin with its name, here and in rewards/."""
    folders = [Path(str(module.__file__)).parent for module in (schema, rewards)]
    of_task = [path for folder in folders for path in sorted(folder.glob(f"{task}*.py"))]
    of_all = [Path(str(module.__file__)) for module in (schema, local_files, problems, sources)]
    return [*of_all, *of_task]


def is_there(paths: Sequence[Path], wanted: str) -> bool:
    """Return whether all files exist as they were made from `wanted`."""
    return all(
        path.exists()
        and _said(path).get(schema.MADE_FROM) == wanted.encode()
        and not _foreign(path)
        for path in paths
    )


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
    content = _said(path).get(schema.CONTENT)
    if content is None:
        return "it cannot be read, or data_prep did not write it"
    is_same = content == schema.content_id(schema.parquet_rows(path))
    return "" if is_same else "it was changed after data_prep wrote it"


def _said(path: Path) -> dict[bytes, bytes]:
    """What the metadata of a file say; nothing, if they cannot be read."""
    try:
        return pq.read_metadata(path).metadata or {}
    except (pa.ArrowException, OSError):
        return {}
