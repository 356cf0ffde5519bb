"""Finds out whether files exist that the same arguments and the same code have made.

Each parquet file holds a hash of what it was made from. Another tool that rewrites the file drops
the hash.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo import rewards
from verl_gdpo.data_prep import DataError, local_files, schema, sources
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
    of_all = [Path(str(module.__file__)) for module in (schema, local_files, sources)]
    return [*of_all, *of_task]


def is_there(paths: Sequence[Path], wanted: str) -> bool:
    """Return whether all files exist and were made from `wanted`.

    Raises:
        DataError: data_prep did not write one of the files, so it must not be replaced.
    """
    found = [_made_from(path) for path in paths if path.exists()]
    return found == [wanted] * len(paths)


def _made_from(path: Path) -> str:
    try:
        said = (pq.read_metadata(path).metadata or {}).get(schema.MADE_FROM)
    except (pa.ArrowException, OSError) as error:
        said, why = None, f"it cannot be read ({error})"
    else:
        why = "it does not say what it was made from, so data_prep did not write it"
    if said is None:
        raise DataError(
            f"{path} is left as it is: {why}. Remove it, or train on it with "
            "data.train_files=FILE data.val_files=FILE"
        )
    return str(said.decode())
