"""Runs programs that nobody has read: apart from the machine, within limits, several at once.

Only a program and its inputs go in. What comes out is text, to be compared out here.

bubblewrap is used where it is installed and works; else namespaces (`unshare`), else limits alone.
`missing()` says what the one in use cannot prevent. In each: CPU and wall time, memory, the sizes
of files and output and the number of processes are limited, the environment is empty, the folder is
a scratch folder, and the end of a run is the end of all that it started.
"""

import contextlib
import fcntl
import functools
import json
import logging
import os
import random
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from verl_gdpo.rewards import sandbox_inside
from verl_gdpo.rewards.sandbox_kinds import FIRST_UID, HASHSEED, PROCESSES, UIDS, Kind, kinds

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 1 << 20  # of one test
READY = sandbox_inside.READY.encode()
LOOK_SECONDS = 0.05  # between two looks, whether a place is free or a run has begun
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


@dataclass
class Notes:
    """How a program was run, for the log of a training. No reward depends on it.

    stopped: it was ended at a limit, or by a signal.
    seconds_waited: for a core or for a service, since these notes were made.
    """

    stopped: bool = False
    seconds_waited: float = 0.0
    made_at: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Note that the program begins."""
        self.seconds_waited = time.monotonic() - self.made_at

    def numbers(self) -> dict[str, float]:
        """What is logged."""
        return {"stopped": float(self.stopped), "seconds_waited": self.seconds_waited}


def run(
    program: str,
    tests: Sequence[Mapping[str, Any]],
    *,
    function: str | None = None,
    seconds: float = 4.0,
    wall_seconds: float = 10.0,
    memory_mb: int = 512,
    notes: Notes | None = None,
) -> list[Outcome]:
    """Run a Python program once for each test; waits until a core is free.

    The first test that a limit or a signal ends is the last one that runs.

    Args:
        program: of Python, with its standard library.
        tests: each {"input": text} or, with `function`, {"args": list, "kwargs": dict} of JSON.
        function: name of the function, or of the method of a class `Solution`, to call; None for a
            program that reads its standard input.
        seconds: CPU time of a test.
        wall_seconds: of all tests together, without what it takes to start Python.
        memory_mb: of each process.
        notes: filled in.

    Returns:
        one outcome a test.

    Raises:
        SandboxError: the machine has no sandbox that works.
    """
    limits = {
        "cpu_seconds": max(1, round(seconds)),
        "wall_seconds": wall_seconds,
        "memory_mb": memory_mb,
    }
    return _run(_kind(), program, tests, function, limits, notes or Notes())


def missing() -> Sequence[str]:
    """What this machine's sandbox cannot prevent, one sentence each.

    Raises:
        SandboxError: it has none that works.
    """
    kind = _kind()
    return [f"{lack} (sandbox {kind.name!r}; install bubblewrap)" for lack in kind.lacks]


_finding = threading.Lock()


def _kind() -> Kind:
    with _finding:  # or threads would try, and warn, all at once
        return _find()


@functools.cache
def _find() -> Kind:
    """The first kind that works, tried once in a process."""
    reasons = []
    for kind in kinds():
        try:
            _try(kind)
        except OSError as error:
            reasons.append(f"{kind.name}: {error}")
            continue
        for reason in reasons:
            logger.warning("verl-gdpo: a sandbox that does not work here: %s", reason)
        for lack in kind.lacks:
            logger.warning("verl-gdpo: sandbox %r: %s. Install bubblewrap", kind.name, lack)
        return kind
    raise SandboxError(
        "no way to run a program apart from this machine works: "
        f"{'; '.join(reasons)}. Install bubblewrap (apt-get install bubblewrap)"
    )


def _try(kind: Kind) -> None:
    """Raise SandboxError unless a program runs."""
    limits = {"cpu_seconds": 10, "wall_seconds": 10.0, "memory_mb": 512}
    (outcome,) = _run(kind, PROBE, [{"input": "hello\n"}], None, limits, Notes())
    if outcome != Outcome(True, PROBE_SAYS):
        raise SandboxError(f"got {outcome} of a program that prints {PROBE_SAYS!r}")


def _run(
    kind: Kind,
    program: str,
    tests: Sequence[Mapping[str, Any]],
    function: str | None,
    limits: Mapping[str, float],
    notes: Notes,
) -> list[Outcome]:
    request = {
        **limits,
        "program": program.encode("utf-8", "replace").decode(),
        "tests": tests,
        "function": function,
        "output_bytes": OUTPUT_BYTES,
        "processes": PROCESSES if kind.is_alone else 0,
        "uid": FIRST_UID + random.SystemRandom().randrange(UIDS) if os.getuid() == 0 else None,
    }
    with _place(), _file(json.dumps(request).encode()) as given, _file() as said, _file() as errors:
        notes.begin()
        _start(kind, request["uid"], given, said, errors, limits["wall_seconds"])
        trouble = _read(errors)
        if not trouble.endswith(READY):
            raise SandboxError(trouble.decode("utf-8", "replace").strip()[-500:] or "no answer")
        lines = _read(said).split(b"\n")[:-1]
    outcomes = [_outcome(line) for line in lines[: len(tests)]]
    notes.stopped = len(outcomes) < len(tests)
    return outcomes + [Outcome(False, "")] * (len(tests) - len(outcomes))


def _start(kind: Kind, uid: Any, given: int, said: int, errors: int, wall_seconds: float) -> None:
    """Run what is inside, and wait for its end or end it, with all that it started."""
    command = (*kind.command, "-c", Path(sandbox_inside.__file__).read_text() + "main()\n")
    with contextlib.ExitStack() as stack:
        folder = None if kind.has_scratch else stack.enter_context(_scratch(uid))
        with subprocess.Popen(
            command,
            stdin=given,
            stdout=said,
            stderr=errors,
            cwd=folder,
            env=dict([HASHSEED]),
            start_new_session=True,
        ) as process:
            try:
                _wait(process.pid, errors, wall_seconds)
            finally:
                # not waited for yet, so the id is still that of this group
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
        if uid is not None and kind.name == "limits":
            # as that user, so that no other process can be meant
            command = ("/bin/sh", "-c", "kill -9 -1 2>/dev/null")
            subprocess.run(command, user=uid, group=uid, extra_groups=[])


def _wait(pid: int, errors: int, wall_seconds: float) -> None:
    """Wait for the end of a run, or until it is late, which a program could prevent inside."""
    late = time.monotonic() + sandbox_inside.STARTUP_SECONDS
    poll = select.poll()
    with os.fdopen(os.pidfd_open(pid)) as handle:
        poll.register(handle, select.POLLIN)
        while not _read(errors).endswith(READY):
            if poll.poll(LOOK_SECONDS * 1000) or time.monotonic() > late:
                return
        poll.poll(wall_seconds * 1000)


@contextlib.contextmanager
def _scratch(uid: int | None) -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="verl-gdpo-scratch-")
    try:
        if uid is not None:
            os.chown(folder, uid, uid)
        yield folder
    finally:
        # not shutil.rmtree, which a thousand nested folders make give up
        subprocess.run(("rm", "-rf", "--", folder), stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def _place() -> Iterator[None]:
    """One of as many places as there are cores, shared by all processes of this user."""
    folder = Path(tempfile.gettempdir()) / f"verl-gdpo-sandboxes-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    names = [folder / str(place) for place in range(len(os.sched_getaffinity(0)))]
    with _looking:
        while (file := next(filter(None, map(_locked, names)), None)) is None:
            time.sleep(LOOK_SECONDS)
    with file:
        yield


_looking = threading.Lock()  # one thread of a process looks for a place, and the others for it


def _locked(name: Path) -> IO[str] | None:
    """The file, locked until it is closed; None if somebody else has locked it."""
    file = name.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


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
