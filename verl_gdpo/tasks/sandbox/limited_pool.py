"""Processes that answer requests within limits of time and memory, shared by a process's threads.

The kernel ends them at their limits, whatever they do: Python's own signal handlers do not
interrupt one long multiplication, and 9^{9^{9^{9}}} freezes the interpreter.

This file is also their program: `limited_pool.py FILE CPU_S WALL_S BYTES`. FILE imports what it
needs, or has `prepare()` for that, and has `answer(say, *request)`, which returns the last reply to
a request and may `say` others before. A process says why it cannot start, or "". Then it gets
requests and gives replies, a line of JSON each: [reply, whether it is the last]. It ends with its
parent, at the end of its input.
"""

import contextlib
import json
import os
import queue
import resource
import runpy
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

# How a request ends its process: time is up, or it is out of memory or of stack.
ENDED_BY_REQUEST = (signal.SIGPROF, signal.SIGALRM, signal.SIGABRT, signal.SIGSEGV)


class LimitedPool:
    """Up to `size` processes, each started when it is first needed.

    Args:
        program: the FILE of the module's docstring.
        cpu_s: of CPU time for a request, so that a busy machine changes no reply.
        max_bytes: of address space.
        wall_s: for a request, in all: for one that waits without end.
    """

    def __init__(
        self, program: str, cpu_s: float, max_bytes: int, *, size: int = 2, wall_s: float = 300.0
    ) -> None:
        self._arguments = (program, str(cpu_s), str(wall_s), str(max_bytes))
        self._size = size
        self.forget()
        _pools.add(self)

    def forget(self) -> None:
        """Have no process; those that there are end at once."""
        # Without it, a thread that comes back would always be the first.
        self._turn = threading.Lock()
        # None stands for a process that is yet to be started.
        self._idle: queue.LifoQueue[_Process | None] = queue.LifoQueue()
        for _ in range(self._size):
            self._idle.put(None)

    def ask(self, request: str, doing: str) -> tuple[list[Any], bool]:
        """Return the replies to a request, and whether the last one is among them.

        It is not if the request needs too much time or memory.

        Args:
            request: a JSON list in one line.
            doing: what the processes do, for the messages.

        Raises:
            OSError: no process can be started, or two in a row die of something else.
        """
        died_of: list[signal.Signals | int] = []
        # One may be killed from outside.
        while len(died_of) < 2:
            with self._turn:
                process = self._idle.get()
            replies: list[Any] = []
            is_whole = False
            try:
                if process is None:
                    process = _Process(self._arguments, doing)
                is_whole = process.ask(request, replies)
            finally:
                # A process is ended after Ctrl-C too, because its replies would be taken for those
                # to the next request.
                if process is not None and not is_whole:
                    died_of.append(process.close())
                    process = None
                self._idle.put(process)
            if is_whole or died_of[-1] in ENDED_BY_REQUEST:
                return replies, is_whole
        raise OSError(
            f"{doing}: two processes in a row ended with {died_of}; expected an answer. Is there "
            "enough memory?"
        )


class _Process:
    def __init__(self, arguments: tuple[str, ...], doing: str) -> None:
        self.process = subprocess.Popen(
            # Python would warn about what a policy writes.
            [sys.executable, "-W", "ignore", __file__, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="ascii",
        )
        # It is called at the end of Python too.
        self._end = weakref.finalize(self, _end, self.process)
        # Why it cannot start; "" if it can, and None if it is dead.
        failed = self._read()
        if failed != "":
            code = self.close()
            reason = failed or f"it ended with {code!r}"
            raise OSError(f"{doing}: no process for it can be started: {reason}")

    def ask(self, request: str, replies: list[Any]) -> bool:
        """Add the replies to a list; return whether the last one is there."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
        while line := self._read():
            reply, is_last = line
            replies.append(reply)
            if is_last:
                return True
        return False

    def _read(self) -> Any:
        """The next line, or None if the process has died."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            return None
        return json.loads(line)

    def close(self) -> signal.Signals | int:
        """End the process; return the signal that ended it, or its exit code."""
        self._end()
        # Another thread may be ending it.
        code = self.process.wait()
        if code < 0:
            return signal.Signals(-code)
        return code


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process at the end of its input, or else by a signal."""
    assert process.stdin is not None and process.stdout is not None
    # What was still to be written has no reader.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    # It comes last, because a thread that reads it holds it until the process has ended.
    process.stdout.close()


_pools: "weakref.WeakSet[LimitedPool]" = weakref.WeakSet()


def _in_child() -> None:
    for pool in _pools:
        pool.forget()


def work(program: str, cpu_s: float, wall_s: float, max_bytes: int) -> None:
    """Answer until the input ends; the module's docstring says how."""
    # Ctrl-C is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    lines = os.fdopen(os.dup(1), "w", encoding="ascii")
    # What a library prints is no reply.
    os.dup2(2, 1)

    def write(line: Any) -> None:
        print(json.dumps(line), file=lines, flush=True)

    def say(reply: Any) -> None:
        write([reply, False])

    def limit(cpu_s: float, wall_s: float) -> None:
        # Their default action ends the process, even inside one long multiplication.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)

    try:
        names = runpy.run_path(program)
        if "prepare" in names:
            names["prepare"]()
    except BaseException as error:
        write(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error
    # Nothing has failed.
    write("")
    for line in sys.stdin:
        limit(cpu_s, wall_s)
        try:
            last = names["answer"](say, *json.loads(line))
        except (MemoryError, RecursionError):
            os.kill(os.getpid(), signal.SIGABRT)
        limit(0, 0)
        write([last, True])


if __name__ == "__main__":
    # Python puts this folder there, whose files belong to a package.
    sys.path[0] = str(Path(__file__).parents[3])
    work(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
else:
    # The parent's replies are not the child's.
    os.register_at_fork(after_in_child=_in_child)
