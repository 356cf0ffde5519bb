"""Makes the calls of a multi-turn question in a process of their own, within limits.

A request holds all calls of a dialogue so far, and is made on fresh simulators. So no dialogue
leaves anything behind for another one, and a process that was ended is simply started again.
"""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from verl_gdpo.evaluation.bfcl import simulators_inside

LIMIT_CPU_S = 5.0  # for a dialogue, so that a busy machine changes no score; most take milliseconds
LIMIT_WALL_S = 300.0  # for one that waits without end
LIMIT_BYTES = 1 << 29  # address space
MAX_REQUEST_BYTES = 1 << 24  # of all calls; their dialogue is longer than any policy can read
# how calls end their process: time is up, or out of memory or of stack in compiled code
_ENDED_BY_CALLS = (signal.SIGPROF, signal.SIGALRM, signal.SIGABRT, signal.SIGSEGV)

# an entry of the package's files: its "id", "initial_config" and "involved_classes" count here
Entry = Mapping[str, Any]


class LimitError(Exception):
    """The calls of a dialogue need too much time or memory, or their results are too long."""


class Simulators:
    """The process; it is started at the first request, and may be asked from any thread."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def results(self, entry: Entry, steps: Sequence[Sequence[str]]) -> list[list[str]]:
        """Return the result of each call of each step, as the package words it for its models.

        Args:
            entry: of the package.
            steps: calls as Python text: "ls(a=True)". Any text is allowed; none is evaluated.

        Raises:
            LimitError: they need too much.
            OSError: the process cannot be started, or two in a row die of something else.
        """
        said: list[list[str]] = self._ask("results", entry, steps)
        return said

    def is_right(
        self,
        entry: Entry,
        turns: Sequence[Sequence[Sequence[str]]],
        gold: Sequence[Sequence[str]],
    ) -> bool:
        """Return what the package's checker says of a dialogue.

        Args:
            entry: of the package.
            turns: the calls of each step of each turn; the last step may have none.
            gold: the calls of each turn.

        Raises:
            as `results`.
        """
        return bool(self._ask("is_right", entry, turns, gold))

    def _ask(self, task: str, entry: Entry, *given: Any) -> Any:
        needed = {key: entry[key] for key in ("id", "initial_config", "involved_classes")}
        request = json.dumps([task, needed, *given])
        said: Any = None
        died_of: list[signal.Signals | int] = []
        with self._turn:
            while said is None and len(request) < MAX_REQUEST_BYTES:
                said = self._reply(request)
                if said is None:
                    died_of.append(self._close())
                    if died_of[-1] in _ENDED_BY_CALLS:
                        break
                if len(died_of) == 2:  # one may be killed from outside
                    raise OSError(
                        f"{entry['id']}: two processes in a row ended with {died_of} in the "
                        f"simulators of bfcl-eval; expected a reply. Is there enough memory?"
                    )
        if said is None or said == simulators_inside.LIMIT:
            raise LimitError(
                f"{entry['id']}: the calls need more than {LIMIT_CPU_S:g} s, "
                f"{LIMIT_BYTES >> 20} MiB or {simulators_inside.ROOM_CHARS} characters of results"
            )
        return said

    def _reply(self, request: str) -> Any:
        """What the process replies, or None if it has died."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
            return _read(process)
        except BaseException:  # its reply would be taken for that to the next request
            self._close()
            raise

    def _start(self) -> "subprocess.Popen[str]":
        limits = (LIMIT_CPU_S, LIMIT_WALL_S, LIMIT_BYTES)
        process = self._process = subprocess.Popen(
            # warnings: of Python, about what a policy writes
            [sys.executable, "-W", "ignore", simulators_inside.__file__, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
        )
        self._end = weakref.finalize(self, _end, process)  # also at the end of Python
        failed = _read(process)
        if failed != "":
            reason = failed or f"it ended with {self._close()!r}"
            raise OSError(f"no process for the simulators of bfcl-eval can be started: {reason}")
        return process

    def _close(self) -> signal.Signals | int:
        """End the process; return the signal that ended it, or its exit code."""
        assert self._process is not None
        process, self._process = self._process, None
        self._end()
        return signal.Signals(-process.returncode) if process.returncode < 0 else process.returncode


def _read(process: "subprocess.Popen[str]") -> Any:
    """The next reply, or None if the process has died."""
    assert process.stdout is not None
    line = process.stdout.readline()
    return json.loads(line) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> None:
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):  # what was still to be written has no reader
            pipe.close()
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
