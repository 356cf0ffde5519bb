"""Gives a run's folder to one launcher, and runs a command so that no process of it is left.

python -m verl_gdpo.run.processes RUN COMMAND...

is the keeper of a command. It is a child subreaper: Linux makes it the parent of each process below
it whose own parent ends, so it finds all that the command has started, whatever their sessions and
environments. When the command ends, or the keeper's input closes, which SIGKILL of the launcher
does too, it ends them all. Then it removes their shared memory, Ray's session, and their folder for
temporary files.

If the keeper itself gets SIGKILL, a mark in the environment is what finds the processes: for the
launcher, or, if that is dead too, for the next one in this folder.

Relies on Ray 2: the driver that starts Ray names its session `session_DATE_TIME_PROCESS`, in the
folder `ray` of $RAY_TMPDIR, $TMPDIR or /tmp, or in `_temp_dir`. A cluster that was there before has
a session of another process, which stays.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

MARK = "VERL_GDPO_RUN"
WANTED = b"wanted"  # what a launcher says on the input if somebody asked for the end
SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE_SECONDS = 5.0  # the driver gets this time to end by itself
POLL_SECONDS, SEGMENTS_SECONDS, GIVE_UP_SECONDS = 0.2, 10.0, 10.0
SHARED_MEMORY = "/dev/shm"
SEGMENTS = ("psm_", "sem.mp-")  # as Python names them
MAPPED = re.compile(r" (\d+) +/dev/shm/")  # the inode, in /proc/PID/maps
LOGS = "ray_logs"
SESSION_TIME = "%Y-%m-%d_%H-%M-%S"  # in the names of Ray's sessions
TEMP_DIR = re.compile(r"\+*ray_kwargs\.ray_init\._temp_dir=['\"]?([^'\"]*)")


class BusyError(RuntimeError):
    """A living process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, what: str, *, wait: bool = False) -> Iterator[str]:
    """Lock the file `path` during the block. The file is not deleted.

    Yields the beginning of the marks of all starts in a run's folder. It differs for a copy of the
    folder, and no other file can have it while the launcher lives.

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
        except OSError as error:
            raise OSError(
                f"{path}: its file system has no locks ({error.strerror}); expected one that has, "
                "so choose another folder for the run, or mount this one with locks"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        status = os.fstat(file.fileno())
        yield f"{status.st_dev:x}:{status.st_ino:x}:"


def keeper(run: Path, command: Sequence[str]) -> list[str]:
    """Return the command that keeps a command, and ends with its exit code as a shell has it."""
    return [sys.executable, "-m", "verl_gdpo.run.processes", str(run), *command]


def main() -> int:
    run, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    since, segments, asked = time.strftime(SESSION_TIME), set[Path](), None
    with tempfile.TemporaryDirectory(prefix="vg_", ignore_cleanup_errors=True) as temporary:
        os.environ["TMPDIR"] = temporary  # for what nobody removes, such as the sockets of vLLM
        # in its own session, whose signals do not reach the keeper
        driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        if not _wait(driver, segments):
            asked = sys.stdin.buffer.read()
            driver.terminate()  # gives it time to end Ray
            with contextlib.suppress(subprocess.TimeoutExpired):
                driver.wait(GRACE_SECONDS)
        try:
            if (ended := end(_descendants, segments)) and asked == b"":
                print(f"verl-gdpo: the launcher of this run is dead; ended {', '.join(ended)}")
        except RuntimeError as error:
            print(f"verl-gdpo: {error}")
    keeps_logs = driver.returncode != 0 and asked != WANTED
    clear_sessions(driver.pid, since, command, Path(run) if keeps_logs else None)
    code = driver.returncode or 0  # nobody asks for that of one that had to be killed
    return code if code >= 0 else 128 - code


def _wait(driver: "subprocess.Popen[bytes]", segments: set[Path]) -> bool:
    """Return whether the driver has ended; it has not if the input closes first.

    Args:
        segments: what its processes have in /dev/shm is added; after their end, nobody can say
            whose it was.
    """
    looked = time.monotonic()
    while driver.poll() is None:
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            return False
        if time.monotonic() > looked + SEGMENTS_SECONDS:
            below = _descendants()
            segments |= _mapped_by(below)
            # the dead ones have no other parent
            psutil.wait_procs([one for one in below if one.pid != driver.pid], timeout=0)
            looked = time.monotonic()
    return True


def _descendants() -> list[psutil.Process]:
    return [*psutil.Process().children(recursive=True)]


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes with a mark that begins with `mark`, and all below them."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK, "").startswith(mark):
                yield process
                yield from process.children(recursive=True)


def end(find: Callable[[], Iterable[psutil.Process]], segments: Iterable[Path] = ()) -> list[str]:
    """End the processes that are found, until none is found any more; remove their shared memory.

    It stays in /dev/shm when a process is killed, as Ray does with its own at the end: vLLM leaves
    some 400 MB a server.

    Args:
        segments: of processes that have ended before.

    Returns:
        The ended processes, each as "name (id)".

    Raises:
        RuntimeError: a process survives SIGKILL.
    """
    ended: dict[str, None] = {}
    left = {*segments}
    give_up = time.monotonic() + GIVE_UP_SECONDS
    while alive := [*find()]:
        if time.monotonic() > give_up:
            raise RuntimeError(f"these processes of the run survive SIGKILL: {alive}")
        left |= _mapped_by(alive)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                ended[f"{process.name()} ({process.pid})"] = None
                process.kill()
        psutil.wait_procs(alive, timeout=0.05)  # those of another parent may take longer
    for segment in left:
        segment.unlink(missing_ok=True)
    return list(ended)


def _mapped_by(processes: Iterable[psutil.Process]) -> set[Path]:
    """Return the shared memory and semaphores of Python that the processes have mapped."""
    segments, mapped = {}, set[str]()
    with contextlib.suppress(FileNotFoundError):
        for file in os.scandir(SHARED_MEMORY):
            if file.name.startswith(SEGMENTS):  # a semaphore is mapped under another name
                segments[str(file.inode())] = Path(file)
    for process in processes if segments else ():  # most runs have none
        with contextlib.suppress(OSError):
            mapped.update(MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return {path for inode, path in segments.items() if inode in mapped}


def clear_sessions(driver: int, since: str, command: Sequence[str], run: Path | None) -> None:
    """Remove the sessions that a driver has started, after all of its processes have ended.

    Args:
        driver: its process id, which a cluster that runs may have had before.
        since: the time of its start, in the form `SESSION_TIME`.
        command: its command, which may name another folder for Ray.
        run: if not None, the logs are moved into this folder first.
    """
    base = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    named = [found[1] for argument in command if (found := TEMP_DIR.match(argument))]
    for folder in (Path(base) / "ray", *map(Path, named)):
        for session in folder.glob(f"session_*_{driver}"):
            if session.name.removeprefix("session_") < since:
                continue
            if run is not None and run.exists():
                with contextlib.suppress(OSError):
                    shutil.move(session / "logs", run / LOGS / session.name)
            shutil.rmtree(session, ignore_errors=True)
        latest = folder / "session_latest"
        if latest.is_symlink() and not latest.exists():
            latest.unlink()


if __name__ == "__main__":
    sys.exit(main())
