"""Gives a run's folder to one launcher, ends the run's processes, and clears what Ray leaves.

The processes are found by a mark in their environment and by their session. Ray's processes inherit
both. The session is needed for Ray's agents, which overwrite their environment with their title.

Relies on Ray 2: the driver that starts Ray names its session `session_DATE_TIME_PROCESS`, in the
folder `ray` of $RAY_TMPDIR, $TMPDIR or /tmp, or in `_temp_dir`. A cluster that was there before has
a session of another process, which stays.

python -m verl_gdpo.run.processes MARK FOLDER

is the watchdog of a launcher. As soon as its standard input closes, it ends all processes with the
mark and removes the folder. This happens whenever the launcher ends, even by SIGKILL.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

MARK = "VERL_GDPO_RUN"
GIVE_UP_SECONDS = 10.0
SHARED_MEMORY = Path("/dev/shm")
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


def processes_of(mark: str, known: set[int]) -> tuple[list[psutil.Process], set[int]]:
    """Return the living processes of a run, and the sessions that are its own.

    The sessions are the `known` ones and those of all processes with this mark. A driver starts in
    its own session, so these sessions only hold processes of the run.
    """
    living, sessions = [], {*known}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE:
                session = os.getsid(process.pid)
                living.append((process, session))
                if process.environ().get(MARK, "").startswith(mark):
                    sessions.add(session)
    ours = sessions - {os.getsid(0)}
    return [process for process, session in living if session in ours], sessions


def segments_of(mark: str) -> set[Path]:
    """Return the shared memory and semaphores of Python that a run's processes have mapped.

    They stay in /dev/shm when a process is killed, as Ray does with its own at the end: vLLM leaves
    some 400 MB a server.
    """
    # most runs have none, and there is no need to look at all processes
    return _mapped_by(processes_of(mark, set())[0]) if _segments() else set()


def _segments() -> dict[str, Path]:
    """Those of all processes, by inode, since a semaphore is mapped under another name."""
    found = {}
    for path in SHARED_MEMORY.glob("*"):
        if path.name.startswith(SEGMENTS):
            with contextlib.suppress(FileNotFoundError):
                found[str(path.stat().st_ino)] = path
    return found


def _mapped_by(processes: Iterable[psutil.Process]) -> set[Path]:
    mapped: set[str] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            mapped.update(MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return {path for inode, path in _segments().items() if inode in mapped}


def end_run(mark: str, session: int | None = None, segments: Iterable[Path] = ()) -> list[str]:
    """End all processes with a mark that begins with `mark`, and all others in their sessions.

    Then their shared memory is removed.

    Args:
        session: the driver's session, for processes that survive all others with the mark.
        segments: of processes that have ended before.

    Returns:
        The ended processes, each as "name (id)".

    Raises:
        RuntimeError: a process survives SIGKILL.
    """
    ended: dict[str, None] = {}
    left = {*segments}
    sessions = set() if session is None else {session}
    begin = time.monotonic()
    alive, sessions = processes_of(mark, sessions)
    while alive:
        if time.monotonic() - begin > GIVE_UP_SECONDS:
            raise RuntimeError(f"these processes of the run survive SIGKILL: {alive}")
        left |= _mapped_by(alive)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                ended[f"{process.name()} ({process.pid})"] = None
                process.kill()
        time.sleep(0.05)  # and not until they are reaped, which their new parent may put off
        alive, sessions = processes_of(mark, sessions)
    for segment in left:
        segment.unlink(missing_ok=True)
    return list(ended)


@contextlib.contextmanager
def watchdog(mark: str, temporary: str, log: IO[bytes]) -> Iterator[None]:
    """After the block, or when this process dies in it, end all processes with `mark`.

    Then the folder `temporary` of these processes is removed.
    """
    command = [sys.executable, "-m", "verl_gdpo.run.processes", mark, temporary]
    # in its own session, so that a signal to our process group does not reach it
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    ):
        yield


def clear_sessions(
    driver: int,
    since: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    run: Path | None,
) -> None:
    """Remove the sessions that a driver has started, after all of its processes have ended.

    Args:
        driver: its process id, which a cluster that runs may have had before.
        since: the time of its start, in the form `SESSION_TIME`.
        command: its command, which may name another folder for Ray.
        run: if not None, the logs are moved into this folder first.
    """
    for folder in _folders(command, environment):
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


def _folders(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[Path]:
    base = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    yield Path(base) / "ray"
    for argument in command:
        if found := TEMP_DIR.match(argument):
            yield Path(found[1])


def main() -> int:
    sys.stdin.buffer.read()
    if ended := end_run(sys.argv[1]):
        print(f"verl-gdpo: the launcher of this run is dead; ended {', '.join(ended)}", flush=True)
    shutil.rmtree(sys.argv[2], ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
