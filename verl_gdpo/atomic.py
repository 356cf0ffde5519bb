"""Writes files so that they appear complete or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_together(*paths: Path) -> Iterator[list[Path]]:
    """Yield one temporary path per path, and move all files into place after the block.

    The temporary files are in the folders of their targets, so that each move is a rename. If the
    block or a move fails, all targets stay as they were and no temporary file is left. Only a kill
    between two renames can leave a new file beside an old one. Missing folders are made. If a path
    is a link, it stays a link, and the file that it points to is replaced.
    """
    paths = tuple(path.resolve() for path in paths)
    token = uuid.uuid4().hex
    temporary = [path.with_name(f".{path.name}.{token}.tmp") for path in paths]
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: got a folder; expected a file or nothing there")
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        for path in temporary:
            _flush_to_disk(path)
        _move_all(temporary, paths)
    finally:
        for path in temporary:
            path.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _move_all(temporary: Sequence[Path], paths: Sequence[Path]) -> None:
    """Rename each temporary file to its path; undo all renames if one fails."""
    backups = [path.with_suffix(".old") for path in temporary]
    try:
        # nothing can fail after the last rename, so its target needs no backup
        for path, backup in zip(paths[:-1], backups, strict=False):
            if path.exists():
                shutil.copy2(path, backup)
        for source, path in zip(temporary, paths, strict=True):
            os.replace(source, path)
    except BaseException:
        moved = [not source.exists() for source in temporary]
        for path, backup, is_moved in zip(paths, backups, moved, strict=True):
            if is_moved and not all(moved):
                if backup.exists():
                    os.replace(backup, path)
                else:
                    path.unlink()
        raise
    finally:
        for backup in backups:
            backup.unlink(missing_ok=True)
