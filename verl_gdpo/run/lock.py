"""A file lock that one process holds at a time and that its death frees."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class BusyError(RuntimeError):
    """A living process holds the lock."""


@contextmanager
def locked(path: Path, what: str, *, wait: bool = False) -> Iterator[os.stat_result]:
    """Lock the file `path` during the block, and yield its status. The file is not deleted.

    Args:
        path: the file; it is made if it does not exist, and gets the id of this process.
        what: the name of the locked thing in messages.
        wait: if True, print a message and wait for the other process instead of raising.

    Raises:
        BusyError: another process holds the lock, and `wait` is False.
        OSError: the file cannot be written, or its file system has no locks.
    """
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = f"process {file.read().strip() or 'unknown'}"
            if not wait:
                raise BusyError(
                    f"{what} is in use by {holder}, which is alive: wait for it, or end it"
                ) from None
            print(f"{what} is in use by {holder}; waiting for it", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield os.fstat(file.fileno())
