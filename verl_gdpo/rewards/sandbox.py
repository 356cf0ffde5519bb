"""Runs programs that nobody has read: apart from the machine, within limits, several at once.

Only a program and its inputs go in. What comes out is text, to be compared out here.

bubblewrap is used where it is installed and works, else Landlock; both with seccomp. `missing()`
says what the one in use cannot prevent. In each: CPU and wall time, memory, the sizes of files and
output and the number of threads are limited, the environment is empty, and a program can start no
process, open no socket, and signal nobody.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import random
import select
import stat
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_gdpo.rewards import sandbox_inside, sandbox_lock
from verl_gdpo.rewards.sandbox_kinds import (
    ENVIRONMENT,
    FIRST_UID,
    UIDS,
    Kind,
    advice,
    can_change_user,
    kinds,
)

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 1 << 20  # of one test
WALL_SHARE = 3  # wall time of a test per CPU time: other work on the machine costs it some
ALL_SHARE = 10  # wall time of all tests per CPU time of one
KILL_SECONDS = 5.0  # for what ends a run from the inside, before it is ended from here
PROBE, PROBE_SAYS = "import queue\nprint(input()[::-1])", "olleh\n"


class SandboxError(OSError):
    """This machine cannot run the program. It says nothing about the program."""


@dataclass(frozen=True)
class Outcome:
    """How one test ended.

    finished: by itself, without an exception or an exit code, within all limits.
    output: what it printed or, for a function, its result as JSON; "" if it did not finish. Bytes
        that are not UTF-8 are replaced. It can be anything, also text that is no JSON.
    """

    finished: bool
    output: str


def run(
    program: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    function: str | None = None,
    seconds: float = 4.0,
    memory_mb: int = 512,
    allow_weak: bool = False,
) -> list[Outcome]:
    """Run a Python program once for each test; waits until a core is free.

    Args:
        program: of Python, with its standard library.
        tests: each {"input": text} or, with `function`, {"args": list, "kwargs": dict} of JSON.
        function: name of the function, or of the method of a class `Solution`, to call; None for a
            program that reads its standard input.
        seconds: CPU time of a test. The wall time of one is limited to 3 times, that of all
            together to 10 times as much; tests for which none is left do not run.
        memory_mb: of the program.
        allow_weak: if nothing better works here, root runs programs that can read the expected
            results, as `missing` then says.

    Returns:
        one outcome a test.

    Raises:
        SandboxError: the machine has no sandbox that works.
    """
    return _run(_kind(allow_weak), program, tests, function, seconds, memory_mb)


def missing(allow_weak: bool = False) -> Sequence[str]:
    """What this machine's sandbox cannot prevent or give, and what to do about it.

    Raises:
        SandboxError: it has none that works.
    """
    kind = _kind(allow_weak)
    return [f"sandbox {kind.name!r}: {kind.lacks}. {advice()}"] if kind.lacks else []


_finding = threading.Lock()


def _kind(allow_weak: bool = False) -> Kind:
    with _finding:  # or threads would try, and warn, all at once
        return _find(allow_weak)


@functools.cache
def _find(allow_weak: bool) -> Kind:
    """The first kind that works, tried once in a process."""
    reasons = []
    for kind in kinds(allow_weak):
        try:
            _try(kind)
        except OSError as error:
            reasons.append(f"{kind.name}: {error}")
            continue
        for reason in reasons:
            logger.warning("verl-gdpo: a sandbox that does not work here: %s", reason)
        if kind.lacks:
            logger.warning("verl-gdpo: sandbox %r: %s. %s", kind.name, kind.lacks, advice())
        return kind
    tried = "; ".join(reasons) or "neither bubblewrap nor Landlock is here"
    weak = ". Weaker, as root alone: reward.reward_kwargs.weak_sandbox=True" * (not allow_weak)
    raise SandboxError(f"no sandbox for programs works on this machine ({tried}). {advice()}{weak}")


def _try(kind: Kind) -> None:
    """Raise SandboxError unless a program runs."""
    (outcome,) = _run(kind, PROBE, [{"input": "hello\n"}], None, 10.0, 512)
    if outcome != Outcome(True, PROBE_SAYS):
        raise SandboxError(f"got {outcome} of a program that prints {PROBE_SAYS!r}")


def _run(
    kind: Kind,
    program: str,
    tests: Sequence[Mapping[str, Any]],
    function: str | None,
    seconds: float,
    memory_mb: int,
) -> list[Outcome]:
    request = {
        "program": program.encode("utf-8", "replace").decode(),
        "tests": tests,
        "function": function,
        "cpu_seconds": max(1, round(seconds)),
        "wall_seconds": WALL_SHARE * seconds,
        "wall_seconds_of_all": ALL_SHARE * seconds,
        "memory_mb": memory_mb,
        "output_bytes": OUTPUT_BYTES,
        "uid": FIRST_UID + random.SystemRandom().randrange(UIDS) if can_change_user() else None,
        "readable": kind.readable,
        "folder": kind.folder,
        "landlock": kind.landlock,
    }
    limit = sandbox_inside.STARTUP_SECONDS + ALL_SHARE * seconds + KILL_SECONDS
    with _place(), _file(json.dumps(request).encode()) as given, _file() as said, _file() as errors:
        _start(kind, given, said, errors, limit)
        trouble = _read(errors)
        if not trouble.endswith(sandbox_inside.READY.encode()):
            raise SandboxError(
                trouble.decode("utf-8", "replace").strip().split("\n")[-1] or "no answer"
            )
        lines = _read(said).split(b"\n")
    outcomes = [_outcome(line) for line in lines[: len(tests)]]
    return outcomes + [Outcome(False, "")] * (len(tests) - len(outcomes))


def _start(kind: Kind, given: int, said: int, errors: int, limit: float) -> None:
    """Run what is inside, and wait for its end or end it."""
    texts = [Path(str(module.__file__)).read_text() for module in (sandbox_lock, sandbox_inside)]
    with subprocess.Popen(
        (*kind.command, "-c", "\n".join([*texts, "main(lock)\n"])),
        stdin=given,
        stdout=said,
        stderr=errors,
        cwd="/",
        env=ENVIRONMENT,
        pass_fds=kind.files,
        start_new_session=True,
    ) as process:
        try:
            handle = os.pidfd_open(process.pid)
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            poll.poll(limit * 1000)
            os.close(handle)
        finally:
            # not waited for yet, so the id is still that of this group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


@contextlib.contextmanager
def _place() -> Iterator[None]:
    """One of as many places as there are cores, shared by all processes of this user.

    Raises:
        SandboxError: somebody else has made the folder of the places, or can write to it.
    """
    path = Path(tempfile.gettempdir()) / f"verl-gdpo-sandboxes-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    count = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        folder = _open(stack, str(path), os.O_PATH)
        found, mine = os.fstat(folder), (os.getuid(), "drwx------")
        if (found.st_uid, stat.filemode(found.st_mode)) != mine:
            raise SandboxError(
                f"{path}: got {stat.filemode(found.st_mode)} of user {found.st_uid}; expected "
                f"{mine[1]} of user {mine[0]}. Remove it, or set TMPDIR to a folder of your own"
            )
        places = random.sample(range(count), count)
        files = [_open(stack, str(n), os.O_RDWR | os.O_CREAT, folder) for n in places]
        if not any(map(_is_locked, files)):
            fcntl.flock(files[0], fcntl.LOCK_EX)
        yield


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


@contextlib.contextmanager
def _file(content: bytes = b"") -> Iterator[int]:
    """A file in memory: what a program writes there is bounded by the limit of file sizes."""
    with os.fdopen(os.memfd_create("sandbox"), "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        file.seek(0)
        yield file.fileno()


def _read(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _outcome(line: bytes) -> Outcome:
    """What the inside says of one test; anything it says is possible."""
    try:
        said = json.loads(line)
        return Outcome(said["how"] == sandbox_inside.FINISHED, str(said["output"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return Outcome(False, "")
