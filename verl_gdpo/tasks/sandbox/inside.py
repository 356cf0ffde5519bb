"""Runs one program on its inputs. This file's text is what Python executes inside the sandbox.

`main` is given a request and writes one JSON line a test; see `__init__.py`, which reads them. It
knows no expected results, so a program that takes it over has nothing to gain from it.

The standard library alone, and nothing newer than Python 3.9: the machine's own Python may run it.
"""

import bisect
import gc
import json
import os
import random
import resource
import select
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

READY = "ready"  # on stderr: what goes wrong after it is the program's doing
FINISHED, FAILED, STOPPED = "finished", "failed", "stopped"
STARTUP_SECONDS = 30
NOT_JSON = b"?"  # a result that JSON cannot hold
# what verl's own scorers import for a program, and in this order
MODULES = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "sys", "json"),
)
STARS = "".join(f"from {name} import *\n" for name in (*MODULES, "builtins", "typing"))
# `quit` as `site` defines it, which is not loaded
PRELUDE = STARS + "".join(f"import {name}\n" for name in MODULES) + "quit = exit\n"
RECURSION_LIMIT = 600_000  # verl's
THREADS = 256  # of a program; or fewer, if its user starts others meanwhile
STACK_BYTES = 8 << 20  # of a thread, unless a program asks for more or less
MOST_TASKS = 1 << 22  # of a machine, for Linux
# Files and folders that a program may have in its folder. Each takes some 1.4 KB of the kernel's
# memory, which no other limit counts. Between two looks a busy core makes some 250 more, so a
# program is ended at half of what the pages promise, which is 4,096
MOST_FILES = 2048
SECONDS_BETWEEN_LOOKS = 0.002


def main(lock: Callable[..., None], caller: int) -> None:
    """Run the program of the request on standard input.

    Args:
        lock: of `lock.py`.
        caller: a pidfd of the process that waits for the outcomes.
    """
    request = json.loads(sys.stdin.buffer.read()) | {"caller": caller}
    confine(request)
    namespace = prelude(request)
    # where the program cannot take it back: nothing of it has run, and it never gets this file
    sys.stderr.write(READY)
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.setrecursionlimit(RECURSION_LIMIT)
    gc.freeze()  # or each test would copy most of this memory as it ends, in twice the CPU time
    for test in request["tests"]:
        how, output = run(request, test, namespace, lock)
        if how == STOPPED:
            return  # a program that never ends would spend as much on each of its other tests
        text = output.decode("utf-8", "replace")
        print(json.dumps({"how": how, "output": text}), flush=True)


def prelude(request: Any) -> dict[str, Any]:
    """The names of a module, which a program's classes find by its name, as for `pickle`."""
    module = types.ModuleType("program" if request["function"] else "__main__")
    sys.modules[module.__name__] = module
    exec(PRELUDE, module.__dict__)
    return module.__dict__


def confine(request: Any) -> None:
    """Set limits that hold for this process and all that it starts, and stop being root."""
    megabytes = request["memory_mb"] << 20
    everything = request["output_bytes"] * (len(request["tests"]) + 1) * 6  # as escaped JSON
    largest_input = max(len(test.get("input", "").encode()) for test in request["tests"])
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, megabytes),
        (resource.RLIMIT_FSIZE, max(everything, largest_input)),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    if request["uid"] is not None:
        try:
            os.setgroups([])
            os.setgid(request["uid"])
            os.setuid(request["uid"])
        except PermissionError:
            raise OSError(
                "root lacks CAP_SETUID and CAP_SETGID to run it as another user"
            ) from None
        # a program may import what the prelude does not
        with open(os.__file__):
            pass
    threading.stack_size(STACK_BYTES)  # where `ulimit -s` is more than the memory, no thread starts
    # how many tasks its user has, of which other containers may hide some; the limit counts them
    tasks = bisect.bisect_left(range(MOST_TASKS), True, key=can_start_a_thread)
    if tasks == 0:
        raise OSError("threads cannot be limited: this is root, without rights to change the user")
    limit_tasks(tasks + THREADS, for_good=True)
    os.environ.clear()


def limit_tasks(most: int, for_good: bool = False) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most if for_good else hard))


def can_start_a_thread(most_tasks: int) -> bool:
    limit_tasks(most_tasks)
    thread = threading.Thread(target=int)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True


def run(request: Any, test: Any, namespace: Any, lock: Callable[..., None]) -> tuple[str, bytes]:
    """Run one test in a child; return how it ended, and its output or its result as JSON."""
    stdin, output = os.memfd_create("input"), os.memfd_create("output")
    if not request["function"]:
        os.write(stdin, test["input"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        os.close(request["caller"])
        become_the_program(request, stdin, output)
        libraries = (f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64")
        lock([*request["readable"], *libraries], request["folder"], request["landlock"])
        execute(request, test, namespace)
        sys.exit(0)  # as any program ends: after its threads, `atexit` and buffers
    wait(child, request["caller"], request["folder"])
    status = os.waitpid(child, 0)[1]
    os.lseek(output, 0, os.SEEK_SET)
    text = os.read(output, request["output_bytes"])
    os.close(stdin)
    os.close(output)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        # a function that ends the process returns nothing
        return (FINISHED if text or not request["function"] else FAILED), text
    return (FAILED if os.WIFEXITED(status) else STOPPED), b""


def wait(child: int, caller: int, folder: "str | None") -> None:
    """Wait for the end of the child; end with the caller, and then the child ends too.

    The signal of a parent's death would not do: it is lost when the user changes, and would also
    come when a thread of the caller ends. A child that makes too many files is ended.

    Args:
        folder: the one that the child may write to, a file system of its own; None for none.
    """
    poll, handle = select.poll(), os.pidfd_open(child)
    for process in (handle, caller):
        poll.register(process, select.POLLIN)
    milliseconds = None if folder is None else SECONDS_BETWEEN_LOOKS * 1000
    while True:
        ended = dict(poll.poll(milliseconds))
        if caller in ended:
            os._exit(1)
        if handle in ended:
            break
        if folder is not None and files_in(folder) > MOST_FILES:
            os.kill(child, signal.SIGKILL)  # it is not waited for yet, so this is its id
            milliseconds = folder = None
    os.close(handle)


def files_in(folder: str) -> int:
    """Return how many files and folders a file system has, with those that are removed and open."""
    status = os.statvfs(folder)
    return status.f_files - status.f_ffree


def become_the_program(request: Any, stdin: int, output: int) -> None:
    """In the child: only the program's own files stay open, and tighter limits hold."""
    random.seed(0)  # the same program gives the same output, unless it reads the clock
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(stdin, 0)
    os.dup2(nothing if request["function"] else output, 1)
    os.dup2(nothing, 2)
    if request["function"]:
        os.dup2(output, 3)
    os.closerange(4 if request["function"] else 3, 64)
    for limit, value in (
        (resource.RLIMIT_FSIZE, request["output_bytes"]),
        (resource.RLIMIT_CPU, request["cpu_seconds"]),
    ):
        resource.setrlimit(limit, (value, value))


def execute(request: Any, test: Any, namespace: Any) -> None:
    """Run the program, then its function if it has one."""
    name = request["function"]
    exec(compile(request["program"], "program.py", "exec"), namespace)
    if not name:
        return
    # the method first: the prelude has functions of such names as `merge`
    is_method = hasattr(namespace.get("Solution"), name)
    function = getattr(namespace["Solution"](), name) if is_method else namespace[name]
    value = function(*test["args"], **test["kwargs"])
    try:
        text = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        text = NOT_JSON
    with open(3, "wb") as file:
        file.write(text)
    os._exit(0)
