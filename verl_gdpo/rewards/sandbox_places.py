"""As many places for programs as this machine has cores, which all processes of a user share."""

import contextlib
import fcntl
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # "QUOTA PERIOD" of a container, or "max PERIOD"
LOOK_SECONDS = 0.05  # between two looks at what somebody waits for


class SandboxError(OSError):
    """This machine cannot run the program. It says nothing about the program."""


@contextlib.contextmanager
def place() -> Iterator[None]:
    """One of as many places as there are cores, shared by all processes of this user.

    Raises:
        SandboxError: somebody else has made the folder of the places, or can write to it.
    """
    places = range(cores())
    with contextlib.ExitStack() as mine:
        with contextlib.ExitStack() as looking:
            folder = _folder(looking)
            looking.enter_context(_looking)
            while not any(_takes(mine, str(name), folder) for name in places):
                time.sleep(LOOK_SECONDS)
        yield


def cores() -> int:
    """How many this process may use: those of its affinity, or its container's share of them."""
    here = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, CPU_MAX.read_text().split())
        here = max(1, min(here, quota // period))
    return here


_looking = threading.Lock()  # one thread of a process looks for a place, and the others for it


def _folder(stack: contextlib.ExitStack) -> int:
    path = Path(tempfile.gettempdir()) / f"verl-gdpo-sandboxes-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = _open(stack, str(path), os.O_PATH)
    found, mine = os.fstat(folder), (os.getuid(), "drwx------")
    if (found.st_uid, stat.filemode(found.st_mode)) != mine:
        raise SandboxError(
            f"{path}: got {stat.filemode(found.st_mode)} of user {found.st_uid}; expected "
            f"{mine[1]} of user {mine[0]}. Remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def _takes(stack: contextlib.ExitStack, name: str, folder: int) -> bool:
    """Whether the file was free; then it is locked until the end of `stack`."""
    with contextlib.ExitStack() as opened:
        file = _open(opened, name, os.O_RDWR | os.O_CREAT, folder)
        if is_free := _is_locked(file):
            # else it stays locked as long as a process that was forked meanwhile
            opened.callback(fcntl.flock, file, fcntl.LOCK_UN)
            stack.push(opened.pop_all())
    return is_free


def _open(stack: contextlib.ExitStack, path: str, flags: int, folder: int | None = None) -> int:
    """Open what is no link, until the end of `stack`."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    stack.callback(os.close, file)
    return file


def _is_locked(file: int) -> bool:
    """Lock the file, unless somebody else has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
