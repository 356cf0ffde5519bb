"""Gives a run's folder to one launcher, and runs a command so that no process of it is left.

python -m verl_gdpo.tools.run.processes COMMAND...

is the keeper of a command. It is a child subreaper: Linux makes it the parent of each process below
it whose own parent ends, so it finds all that the command has started, whatever their sessions and
environments. When the command ends, or the keeper's input closes, which SIGKILL of the launcher
does too, it ends them all, and removes their shared memory and their folder for temporary files. It
removes the folder of Ray's session too, except after a failure, whose reason Ray's logs may have.
If the command cannot start, the keeper says why and ends with `CANNOT_START`.

The launcher is a subreaper too: if the keeper itself gets SIGKILL, it ends what is left, and
removes the folder for temporary files. If both do, the driver gets SIGKILL from Linux, and Ray ends
its own processes.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

import psutil

# Options of prctl(2), from linux/prctl.h.
SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36
SESSION_TIME = "%Y-%m-%d_%H-%M-%S"  # in the names of Ray's sessions
CANNOT_START = 127  # the exit code of a shell for a command that it does not find
GRACE_SECONDS = 5.0  # the driver gets this time to end by itself
POLL_SECONDS = 0.2
SEGMENTS_SECONDS = 10.0  # between two looks for shared memory
GIVE_UP_SECONDS = 30.0
SHARED_MEMORY = Path("/dev/shm")
SEGMENTS = ("psm_", "sem.mp-")  # how the names begin that Python gives
# The errors of a file system that has no locks, as some network file systems.
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
MAPPED = re.compile(r" (\d+) +/dev/shm/")  # the inode, in /proc/PID/maps


@contextlib.contextmanager
def warned_without_locks(path: Path, advice: str) -> Iterator[None]:
    """Warn, and go on behind the block, if it cannot lock `path` on this file system.

    Args:
        path: what the block locks.
        advice: what the user may not do there.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        message = f"WARNING: {path} cannot be locked: {error.strerror}. {advice}"
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def locked(path: Path, what: str, *, wait: bool = False) -> Iterator[None]:
    """Lock the file `path` during the block. The file is not deleted.

    Where the file system has no locks, a warning says that nothing is locked.

    Args:
        path: the file; it is made if it does not exist, and gets the id of this process.
        what: the name of the locked thing in messages.
        wait: if True, print a message and wait for the other process instead of raising.

    Raises:
        RuntimeError: another process holds the lock, and `wait` is False.
        OSError: the file cannot be written.
    """
    with path.open("a+") as file:
        advice = f"Nothing keeps another process from using {what}: start no second one there"
        with warned_without_locks(path, advice):
            _lock(file, what, wait)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _lock(file: TextIO, what: str, wait: bool) -> None:
    """Lock an open file, as `locked` says."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = f"process {file.read().strip() or 'unknown'}"
        if not wait:
            raise RuntimeError(
                f"{what} is in use by {holder}, which is alive: wait for it, or end it"
            ) from None
        print(f"{what} is in use by {holder}; waiting for it", file=sys.stderr, flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)


def keeper(command: Sequence[str]) -> list[str]:
    """Return the command that keeps a command, and ends with its exit code as a shell has it."""
    return [sys.executable, "-m", "verl_gdpo.tools.run.processes", *command]


def main() -> int:
    since = time.strftime(SESSION_TIME)
    segments: set[Path] = set()
    with (
        adopting() as started,
        tempfile.TemporaryDirectory(
            prefix=_prefix_of(os.getpid()), ignore_cleanup_errors=True
        ) as temporary,
    ):
        os.environ["TMPDIR"] = temporary  # for what nobody removes, such as the sockets of vLLM
        # In its own session, whose signals do not reach the keeper.
        try:
            driver = subprocess.Popen(
                sys.argv[1:],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        except OSError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return CANNOT_START
        has_ended = _wait(driver, started, segments)
        if not has_ended:
            driver.terminate()
            # It gets time to end Ray.
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(GRACE_SECONDS)
        try:
            end(started, segments)
        except RuntimeError as error:
            print(f"verl-gdpo: {error}")
    if driver.returncode == 0 or not has_ended:
        remove_session(driver.pid, since)
    if driver.returncode is None:
        return 0  # Nobody asks for the code of one that had to be killed.
    return code_of_shell(driver.returncode)


def code_of_shell(returncode: int) -> int:
    """Return the exit code that a shell has for subprocess's `returncode`: 128 + signal."""
    if returncode < 0:
        return 128 - returncode
    return returncode


def _prefix_of(keeper: int) -> str:
    """Return how the name of a keeper's folder for temporary files begins."""
    return f"vg_{keeper}_"


def remove_temporary(keeper: int) -> None:
    """Remove the folder for temporary files of a keeper that was killed before it could.

    Args:
        keeper: the process id of a keeper that this process has started, and that has ended.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix_of(keeper)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_session(driver: int, since: str) -> None:
    """Remove the folder of Ray's session that a driver has started.

    Args:
        driver: its process id, which a cluster that runs may have had before.
        since: the time of its start, in the form `SESSION_TIME`.
    """
    around = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    folder = Path(around) / "ray"
    for session in folder.glob(f"session_*_{driver}"):
        if session.name.removeprefix("session_") >= since:
            shutil.rmtree(session, ignore_errors=True)
    latest = folder / "session_latest"
    if latest.is_symlink() and not latest.exists():
        latest.unlink(missing_ok=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _wait(
    driver: "subprocess.Popen[bytes]",
    started: Callable[[], Iterable[psutil.Process]],
    segments: set[Path],
) -> bool:
    """Return whether the driver has ended; it has not if the input closes first.

    Args:
        segments: what its processes have in /dev/shm is added: Ray kills them at the end, and then
            nobody can say whose it was.
    """
    looked = time.monotonic()
    while driver.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if readable:
            return False
        if time.monotonic() > looked + SEGMENTS_SECONDS:
            looked = time.monotonic()
            segments |= shared_by(started())
        _reap_orphans(driver)
    return True


def _reap_orphans(driver: "subprocess.Popen[bytes]") -> None:
    """Wait for the adopted processes that have ended, as nobody else does.

    If the driver has ended, it is left for `subprocess` to wait for.
    """
    while True:
        # WNOWAIT says which process has ended, without waiting for it.
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if dead is None or dead.si_pid == driver.pid:
            return
        os.waitpid(dead.si_pid, 0)


@contextlib.contextmanager
def adopting() -> Iterator[Callable[[], list[psutil.Process]]]:
    """Make this process the parent of what is started in the block and loses its own parent.

    Yields a function that returns what was started in the block and lives, with all below it.
    """
    before = set(psutil.Process().children())

    def started() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child not in before]
        descendants = []
        for child in children:
            with contextlib.suppress(psutil.Error):
                descendants += child.children(recursive=True)
        return children + descendants

    libc = ctypes.CDLL(None)
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield started
    finally:
        libc.prctl(SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def end(find: Callable[[], Iterable[psutil.Process]], segments: Iterable[Path] = ()) -> None:
    """End the processes that `find` returns, until it returns none, and remove what they shared.

    Shared memory stays in /dev/shm when a process is killed: vLLM leaves some 400 MB a server.

    Args:
        segments: of processes that have ended before.

    Raises:
        RuntimeError: a process survives SIGKILL.
    """
    begin = time.monotonic()
    shared = set(segments) | shared_by(find())
    while True:
        alive = list(find())
        if not alive:
            break
        if time.monotonic() > begin + GIVE_UP_SECONDS:
            raise RuntimeError(f"these processes of the run survive SIGKILL: {alive}")
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(alive, timeout=0.05)  # those of another parent may take longer
    for segment in shared:
        segment.unlink(missing_ok=True)


def shared_by(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared memory and semaphores of Python that the processes have mapped."""
    files = [file for file in SHARED_MEMORY.glob("*") if file.name.startswith(SEGMENTS)]
    if not files:
        # As after most runs: then no maps are read.
        return set()
    mapped_inodes: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            file_of_maps = Path(f"/proc/{process.pid}/maps")
            # It has the names of files, which may be in any encoding.
            maps = file_of_maps.read_text(encoding="utf-8", errors="replace")
            mapped_inodes.update(MAPPED.findall(maps))
    segments = set()
    for file in files:
        # The inode is compared, because a semaphore is mapped under another name.
        with contextlib.suppress(OSError):
            if str(file.stat().st_ino) in mapped_inodes:
                segments.add(file)
    return segments


if __name__ == "__main__":
    sys.exit(main())
