"""Runs programs that nobody has read: apart from the machine, within limits, several at once.

Only a program and its inputs go in. What comes out is text, to be compared out here.

bubblewrap is used where it is installed and works, else Landlock; both with seccomp. `missing()`
says what the one in use cannot prevent. In each: CPU and wall time, memory, the sizes of files and
output and the number of threads are limited, the environment is empty, and a program can start no
process, open no socket, and signal nobody.
"""

import contextlib
import functools
import json
import logging
import os
import random
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_gdpo.tasks.sandbox import inside, lock, machine
from verl_gdpo.tasks.sandbox.machine import Confinement
from verl_gdpo.tasks.sandbox.machine import SandboxError as SandboxError

logger = logging.getLogger(__name__)

OUTPUT_BYTES = 1 << 20  # The most that one test may print or return.
READY = inside.READY.encode()
PROBE = "import queue\nprint(input()[::-1])"
PROBE_READS = "hello\n"
PROBE_SAYS = "olleh\n"


@dataclass(frozen=True)
class TestResult:
    """How one test ended.

    finished: by itself, without an exception or an exit code, within all limits.
    output: what it printed or, for a function, its result as JSON; "" if it did not finish. Bytes
        that are not UTF-8 are replaced. It can be anything, also text that is no JSON.
    """

    finished: bool
    output: str


NOT_FINISHED = TestResult(False, "")


@dataclass
class ExecutionNotes:
    """How a program was run, for the log of a training. No reward depends on it.

    stopped: it was ended at a limit, or by a signal.
    seconds_waited: for a core, since these notes were made.
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
    allow_weak: bool = False,
    notes: ExecutionNotes | None = None,
    confinement: Confinement | None = None,
) -> list[TestResult]:
    """Run a Python program once for each test; waits until a core is free.

    The first test that a limit or a signal ends is the last one that runs.

    Args:
        program: of Python, with its standard library.
        tests: each {"input": text} or, with `function`, {"args": list, "kwargs": dict} of JSON.
        function: name of the function, or of the method of a class `Solution`, to call; None for a
            program that reads its standard input.
        seconds: CPU time of a test.
        wall_seconds: of all tests together, without what it takes to start Python.
        memory_mb: of the program.
        allow_weak: if nothing better works here, root runs programs that can read the expected
            results, as `missing` then says.
        notes: filled in.
        confinement: how it is confined; None for the best that works here.

    Returns:
        one result a test.

    Raises:
        SandboxError: the machine has no sandbox that works.
    """
    if confinement is None:
        confinement = _confinement(allow_weak)
    if notes is None:
        notes = ExecutionNotes()
    request = {
        "cpu_seconds": max(1, round(seconds)),
        "memory_mb": memory_mb,
        "program": program.encode("utf-8", "replace").decode(),
        "tests": tests,
        "function": function,
        "output_bytes": OUTPUT_BYTES,
        "uid": _user(),
        "readable": confinement.readable,
        "folder": confinement.folder,
        "landlock": confinement.landlock,
    }
    request_text = json.dumps(request).encode()
    with machine.place(), _file(request_text) as stdin, _file() as stdout, _file() as errors:
        notes.begin()
        _start(confinement, stdin, stdout, errors, wall_seconds)
        trouble = _read(errors)
        if not trouble.endswith(READY):
            last_line = trouble.decode("utf-8", "replace").strip().split("\n")[-1]
            raise SandboxError(last_line or "no answer")
        # What follows the last end of a line was not written to its end.
        lines = _read(stdout).split(b"\n")[:-1]
    results = [_result(line) for line in lines[: len(tests)]]
    missing_count = len(tests) - len(results)
    notes.stopped = missing_count > 0
    return results + [NOT_FINISHED] * missing_count


def missing(allow_weak: bool = False) -> Sequence[str]:
    """What this machine's sandbox cannot prevent or give, and what to do about it.

    Raises:
        SandboxError: it has none that works.
    """
    warning = _confinement(allow_weak).warning()
    if not warning:
        return []
    return [warning]


# Without it, threads would try, and warn, all at once.
_trying = threading.Lock()


def _confinement(allow_weak: bool = False) -> Confinement:
    with _trying:
        return _first_that_works(allow_weak)


@functools.cache
def _first_that_works(allow_weak: bool) -> Confinement:
    """The first way that works, tried once in a process."""
    reasons = []
    for confinement in machine.confinements(allow_weak):
        try:
            _try(confinement)
        except OSError as error:
            reasons.append(f"{confinement.name}: {error}")
            continue
        for reason in reasons:
            logger.warning("verl-gdpo: a sandbox that does not work here: %s", reason)
        warning = confinement.warning()
        if warning:
            logger.warning("verl-gdpo: %s", warning)
        return confinement
    tried = "; ".join(reasons) or "neither bubblewrap nor Landlock is here"
    weak = ""
    if not allow_weak:
        weak = (
            ". Weaker, as root alone: +reward.reward_kwargs.weak_sandbox=True in training, "
            "--weak-sandbox in `data`, --coding-weak-sandbox in `evaluate`"
        )
    raise SandboxError(
        f"no sandbox for programs works on this machine ({tried}). {machine.advice()}{weak}"
    )


def _try(confinement: Confinement) -> None:
    """Raise SandboxError unless a program runs."""
    (result,) = run(PROBE, [{"input": PROBE_READS}], seconds=10, confinement=confinement)
    if result != TestResult(True, PROBE_SAYS):
        raise SandboxError(f"got {result} of a program that prints {PROBE_SAYS!r}")


def _user() -> int | None:
    """A user that nobody else is, where this is root; None for the user that this is."""
    if not machine.can_change_user():
        return None
    return machine.FIRST_UID + random.SystemRandom().randrange(machine.UIDS)


def _start(
    confinement: Confinement, request: int, results: int, errors: int, wall_seconds: float
) -> None:
    """Run what is inside, and wait for its end or end it."""
    texts = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in (lock, inside)]
    with os.fdopen(os.pidfd_open(os.getpid())) as caller:
        texts.append(f"main(lock, {caller.fileno()})\n")
        process = subprocess.Popen(
            (*confinement.command, "-c", "\n".join(texts)),
            stdin=request,
            stdout=results,
            stderr=errors,
            cwd="/",
            env=machine.ENVIRONMENT,
            pass_fds=(*confinement.files, caller.fileno()),
            start_new_session=True,
        )
        with process:
            try:
                _wait(process.pid, errors, wall_seconds)
            finally:
                # It is not waited for yet, so the id is still that of this group.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _wait(pid: int, errors: int, wall_seconds: float) -> None:
    """Wait for the end of a run, or until it is late, which a program could prevent inside."""
    late = time.monotonic() + inside.STARTUP_SECONDS
    poll = select.poll()
    with os.fdopen(os.pidfd_open(pid)) as handle:
        poll.register(handle, select.POLLIN)
        while not _read(errors).endswith(READY):
            if poll.poll(machine.LOOK_SECONDS * 1000) or time.monotonic() > late:
                return
        poll.poll(wall_seconds * 1000)


@contextlib.contextmanager
def _file(content: bytes = b"") -> Iterator[int]:
    """A file in memory: what a program writes there is bounded by the limit of file sizes."""
    with os.fdopen(os.memfd_create("sandbox"), "wb", buffering=0) as file:
        unwritten = memoryview(content)
        while unwritten:
            written = file.write(unwritten)
            unwritten = unwritten[written:]
        file.seek(0)
        yield file.fileno()


def _read(file: int) -> bytes:
    """All of a file, wherever its writer is."""
    return os.pread(file, os.fstat(file).st_size, 0)


def _result(line: bytes) -> TestResult:
    """What the inside says of one test; anything it says is possible."""
    try:
        end = json.loads(line)
        return TestResult(end["how"] == inside.FINISHED, str(end["output"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return NOT_FINISHED
