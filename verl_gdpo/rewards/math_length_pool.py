"""Processes that compare mathematical answers with `math-verify`, shared by a process's threads.

math-verify ends its own work by SIGALRM, which only a main thread can have, and which does not
interrupt Python inside one long multiplication: 9^{9^{9^{9}}} freezes the interpreter. Here each
comparison has a worker process whose end the kernel takes care of, whatever the worker does.

This file is also the worker's program. It says why it cannot start, or "". Then it gets lines of
[ground truth, answer], and replies whether the ground truth is read and, if so, whether both are
equal, in a line each. It ends with its parent, at the end of its input.
"""

import atexit
import contextlib
import json
import logging
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

LIMIT_CPU_S = 3.0  # CPU time, so that a busy machine changes no reward; most take milliseconds
LIMIT_WALL_S = 300.0  # for one that waits without end
LIMIT_BYTES = 4 << 30  # address space
# reward workers are many processes already: verl starts 8
WORKERS = 2
WORKER = __file__  # the program of one
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
        gold_is_read = equal = died_of = None
        try:
            worker = worker or _Worker()
            gold_is_read, equal = worker.ask(ground_truth, answer)
        finally:
            is_there = equal is not None or gold_is_read is False
            if worker is not None and not is_there:
                died_of = worker.close()
            _idle.put(worker if is_there else None)
        if equal is not None:
            return equal
        if is_there or (gold_is_read is None and died_of in ENDED_BY_ANSWER):
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
            [sys.executable, WORKER, *map(str, limits)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
        )
        failed = self._read()
        if failed != "":
            code = self.close()
            reason = failed or f"it ended with {code!r}"
            raise RuntimeError(f"math_length: no process for math-verify can be started: {reason}")

    def ask(self, ground_truth: str, answer: str) -> tuple[bool | None, bool | None]:
        """Whether the ground truth is read, and whether both are equal; None for no reply."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([ground_truth, answer]) + "\n")
            self.process.stdin.flush()
        gold_is_read = self._read()
        return gold_is_read, self._read() if gold_is_read else None

    def _read(self) -> Any:
        """The next reply, or None if the process has died."""
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


def _work(cpu_s: float, wall_s: float, max_bytes: int) -> None:
    """Answer until the input ends; while it compares, the kernel ends this process at the limits.

    Args:
        cpu_s, wall_s: seconds, of CPU time and in all.
        max_bytes: of address space.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no reply

    def reply(value: bool | str) -> None:
        print(json.dumps(value), file=replies, flush=True)

    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except BaseException as error:
        reply(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error

    def read(text: str) -> list[Any]:
        # None: its own limit is by SIGALRM, which stays ours
        return list(parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None))

    logging.disable(logging.CRITICAL)  # it logs a traceback for each text that it cannot read
    read_gold = lru_cache(64)(read)  # the samples of a prompt share it
    reply("")  # nothing has failed
    for line in sys.stdin:
        # their default action ends the process, even inside one long multiplication
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        ground_truth, answer = json.loads(line)
        golds, equal = [], False
        with contextlib.suppress(Exception):
            golds = read_gold(ground_truth)
        if golds:
            reply(True)
            with contextlib.suppress(Exception):  # whatever a model writes, sympy has one for it
                equal = verify(golds, read(answer), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(bool(equal))  # without golds, the first reply and the only one


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose files are no top-level modules
    _work(float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
else:
    _forget_workers()
    os.register_at_fork(after_in_child=_forget_workers)  # the parent's answers are not the child's
    atexit.register(_close_workers)
