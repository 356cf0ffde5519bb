"""Writes files so that they appear complete or not at all."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replace_together(*paths: Path) -> Iterator[list[Path]]:
    """Yield one temporary path per path, and move all files into place after the block.

    The temporary files are in the folders of their targets, so that each move is a rename. If the
    block fails, all targets stay as they were and no temporary file is left. What ends the moves,
    which come last, can leave a new file beside an old one. Missing folders are made. If a path is
    a link, it stays a link, and the file that it points to is replaced. A writer that was killed
    leaves its temporary files; the next one of the same paths removes them.
    """
    paths = tuple(path.resolve() for path in paths)
    token = uuid.uuid4().hex
    temporary = [path.with_name(f".{path.name}.{token}.tmp") for path in paths]
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: got a folder; expected a file or nothing there")
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path)
    with ExitStack() as held:
        for path in temporary:
            held.callback(path.unlink, missing_ok=True)
            held.enter_context(_locked(path))
        yield temporary
        for path in temporary:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for source, path in zip(temporary, paths, strict=True):
            os.replace(source, path)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of dead writers. A living one holds a lock on each of its own."""
    for left in path.parent.glob(f".{escape(path.name)}.{'?' * 32}.tmp"):
        with suppress(OSError), left.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()


def _locked(path: Path) -> BinaryIO:
    """A new file that nobody takes for a leftover."""
    while True:
        file = path.open("wb")
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:  # else it was taken for one before it was locked
            return file
        file.close()
