"""The processes of a run: known by a mark in their environment, and by their session.

Ray's processes inherit both; its agents write their title over their environment.

python -m verl_gdpo.run.processes MARK

is the watchdog of a launcher: it ends what carries the mark as soon as its standard input closes,
which it does however the launcher ends, by SIGKILL too.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import IO

import psutil

MARK = "VERL_GDPO_RUN"
GIVE_UP_SECONDS = 10.0


def family_of(lock: os.stat_result) -> str:
    """What the marks of all starts of a run begin with, given the lock that its launcher holds.

    A copy of the folder has another. While the launcher lives, no other file can have the same.
    """
    return f"{lock.st_dev:x}:{lock.st_ino:x}:"


def processes_of(mark: str, sessions: set[int]) -> list[psutil.Process]:
    """Living processes in `sessions`, to which those of processes with that mark are added.

    A driver starts in a session of its own, so nothing else than the run's is in any of them.
    """
    living = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE:
                session = os.getsid(process.pid)
                living.append((process, session))
                if process.environ().get(MARK, "").startswith(mark):
                    sessions.add(session)
    return [process for process, session in living if session in sessions - {os.getsid(0)}]


def end_run(mark: str, session: int | None = None) -> list[str]:
    """End every process whose mark begins with `mark`, and all others in their sessions.

    Args:
        session: of the driver, for what outlives all that carry the mark.

    Returns:
        what was ended, as "name (id)".

    Raises:
        RuntimeError: a process survives SIGKILL.
    """
    ended: dict[str, None] = {}
    sessions = set() if session is None else {session}
    give_up = time.monotonic() + GIVE_UP_SECONDS
    while alive := processes_of(mark, sessions):
        if time.monotonic() > give_up:
            raise RuntimeError(f"these processes of the run survive SIGKILL: {alive}")
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                ended[f"{process.name()} ({process.pid})"] = None
                process.kill()
        psutil.wait_procs(alive, timeout=1)
    return list(ended)


@contextlib.contextmanager
def watchdog(mark: str, log: IO[bytes]) -> Iterator[None]:
    """End what carries `mark` after the block, or when this process dies in it."""
    command = [sys.executable, "-m", "verl_gdpo.run.processes", mark]
    # in a session of its own, so that what is sent to our process group does not reach it
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
    ):
        yield


def main() -> int:
    sys.stdin.buffer.read()
    if ended := end_run(sys.argv[1]):
        print(f"verl-gdpo: the launcher of this run is dead; ended {', '.join(ended)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
