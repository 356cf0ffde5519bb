"""Writes files so that they appear complete or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def replace_together(*paths: Path) -> Iterator[list[Path]]:
    """Yield one temporary path per path, and move all files into place after the block.

    The temporary files are in the folders of their targets, so that each move is a rename. If the
    block fails, all targets stay as they were and no temporary file is left. What ends the moves,
    which come last, can leave a new file beside an old one. Missing folders are made. If a path is
    a link, it stays a link, and the file that it points to is replaced. A writer that was killed
    leaves its temporary files, with names such as `.NAME.ID.tmp`.
    """
    paths = tuple(path.resolve() for path in paths)
    token = uuid.uuid4().hex
    temporary = [path.with_name(f".{path.name}.{token}.tmp") for path in paths]
    for path in paths:
        if path.is_dir():
            raise IsADirectoryError(f"{path}: got a folder; expected a file or nothing there")
        path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        for path in temporary:
            held.callback(path.unlink, missing_ok=True)
            path.touch()
        yield temporary
        for path in temporary:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        for source, path in zip(temporary, paths, strict=True):
            os.replace(source, path)
