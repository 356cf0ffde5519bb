"""A lock on a file, held by one process at a time; its death frees the lock."""

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
    """Hold the file `path` inside the block, which gets its status; the file stays afterwards.

    Args:
        path: holds the id of the process that has it; made if absent.
        what: what messages call that which the lock stands for.
        wait: for the other process, saying so, instead of raising.

    Raises:
        BusyError: another process holds it, and `wait` is off.
        OSError: the file cannot be written, or its file system knows no locks.
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
