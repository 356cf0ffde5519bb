"""Processes that compare mathematical answers with `math-verify`, shared by a process's threads.

math-verify ends its own work by SIGALRM, which only a main thread can have, and which does not
interrupt Python inside one long multiplication: 9^{9^{9^{9}}} freezes the interpreter. Here each
comparison has a worker process whose end the kernel takes care of, whatever the worker does.
"""

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

LIMIT_CPU_S = 3.0  # CPU time, so that a busy machine changes no reward; most take milliseconds
LIMIT_WALL_S = 300.0  # for one that waits without end
LIMIT_BYTES = 4 << 30  # address space
# reward workers are many processes already: verl starts 8
WORKERS = 2
WORKER = Path(__file__).with_name("math_length_worker.py")
# how an answer ends its worker: time is up, or out of memory or of stack in compiled code
ENDED_BY_ANSWER = (signal.SIGPROF, signal.SIGALRM, signal.SIGABRT, signal.SIGSEGV)


def are_equal(answer: str, ground_truth: str) -> bool:
    """Whether math-verify takes both for the same; may be called from any thread.

    Raises:
        ValueError: the ground truth cannot be read, or needs too long or too much memory.
        RuntimeError: no worker can be started, or two in a row die of something else.
    """
    for _ in range(2):  # one may be killed from outside
        with _turn:
            worker = _idle.get()
        reply, died_of = None, None
        try:
            worker = worker or _Worker()
            reply = worker.ask({"gold": ground_truth, "answer": answer})
        finally:
            if worker is not None and reply is None:
                died_of = worker.close()
            _idle.put(worker if reply is not None else None)
        if reply is not None and reply["gold_is_read"]:
            return bool(reply["equal"])
        if reply is not None or (not worker.gold_was_read and died_of in ENDED_BY_ANSWER):
            raise ValueError(
                f"math_length ground truth: got {ground_truth[:200]!r}, which math-verify cannot "
                f"read within {LIMIT_CPU_S:g} s and {LIMIT_BYTES >> 30} GiB; expected LaTeX or text"
            )
        if died_of in ENDED_BY_ANSWER:
            return False
    raise RuntimeError(
        f"math_length: two processes in a row ended with {died_of!r} while they compared "
        f"{answer[:200]!r} with {ground_truth[:200]!r}; expected an answer. Is there enough memory?"
    )


class _Worker:
    """One process, that compares one pair after the other."""

    def __init__(self) -> None:
        limits = (LIMIT_CPU_S, LIMIT_WALL_S, LIMIT_BYTES)
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
        )
        self.gold_was_read = False
        started = self._read()
        if started != {"ready": True}:
            code = self.close()
            reason = started["failed"] if started else f"it ended with {code!r}"
            raise RuntimeError(f"math_length: no process for math-verify can be started: {reason}")

    def ask(self, pair: dict[str, str]) -> dict[str, Any] | None:
        """The worker's reply, or None if it has died."""
        assert self.process.stdin is not None
        self.gold_was_read = False
        try:
            self.process.stdin.write(json.dumps(pair) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        reply = self._read()
        if reply == {"gold_is_read": True}:
            self.gold_was_read = True
            reply = self._read()
        return reply

    def _read(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> signal.Signals | int:
        """End the process; return the signal that ended it, or its exit code."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what was still to be written has no reader
                pipe.close()
        try:
            code = self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return signal.Signals(-code) if code < 0 else code


_turn: threading.Lock  # to wait; or a thread that comes back would always be the first
_idle: "queue.LifoQueue[_Worker | None]"  # None: a place for one that is yet to be started


def _forget_workers() -> None:
    global _turn, _idle
    _turn = threading.Lock()
    _idle = queue.LifoQueue()
    for _ in range(WORKERS):
        _idle.put(None)


def _close_workers() -> None:
    while not _idle.empty():
        worker = _idle.get()
        if worker is not None:
            worker.close()


_forget_workers()
os.register_at_fork(after_in_child=_forget_workers)  # the parent's answers are not the child's
atexit.register(_close_workers)
