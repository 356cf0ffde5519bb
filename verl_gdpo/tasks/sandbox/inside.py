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

READY = "ready"  # It is said on stderr. What goes wrong after it is the program's doing.
FINISHED = "finished"
FAILED = "failed"
STOPPED = "stopped"
STARTUP_SECONDS = 30
NOT_JSON = b"?"  # A result that JSON cannot hold.
# What verl's own scorers import for a program, and in this order.
MODULES = (
    "string",
    "re",
    "datetime",
    "collections",
    "heapq",
    "bisect",
    "copy",
    "math",
    "random",
    "statistics",
    "itertools",
    "functools",
    "operator",
    "io",
    "sys",
    "json",
)
STARS = "".join(f"from {name} import *\n" for name in (*MODULES, "builtins", "typing"))
IMPORTS = "".join(f"import {name}\n" for name in MODULES)
# `site`, which defines `quit`, is not loaded.
PRELUDE = STARS + IMPORTS + "quit = exit\n"
RECURSION_LIMIT = 600_000  # As verl's.
THREADS = 256  # The most of a program; or fewer, if its user starts others meanwhile.
STACK_BYTES = 8 << 20  # The stack of a thread, unless a program asks for more or less.
MOST_TASKS = 1 << 22  # The most that Linux has on a machine.
# Files and folders that a program may have in its folder. Each takes some 1.4 KB of the kernel's
# memory, which no other limit counts. Between two looks a busy core makes some 250 more, so a
# program is ended at half of what the pages promise, which is 4,096.
MOST_FILES = 2048
SECONDS_BETWEEN_LOOKS = 0.002
MOST_DESCRIPTORS = 64  # Those that are open have smaller numbers.
RESULT = 3  # The descriptor that takes the result of a function.


def main(lock: Callable[..., None], caller: int) -> None:
    """Run the program of the request on standard input.

    Args:
        lock: of `lock.py`.
        caller: a pidfd of the process that waits for the outcomes.
    """
    request = json.loads(sys.stdin.buffer.read())
    request["caller"] = caller
    confine(request)
    namespace = prelude(request)
    # The program cannot take this back: nothing of it has run, and it never gets this file.
    sys.stderr.write(READY)
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.setrecursionlimit(RECURSION_LIMIT)
    # Else each test would copy most of this memory as it ends, in twice the CPU time.
    gc.freeze()
    for test in request["tests"]:
        how, output = run(request, test, namespace, lock)
        if how == STOPPED:
            # A program that never ends would spend as much on each of its other tests.
            return
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
    # As escaped JSON, an output has up to six times as many bytes.
    all_outputs = request["output_bytes"] * (len(request["tests"]) + 1) * 6
    largest_input = max(len(test.get("input", "").encode()) for test in request["tests"])
    set_limit(resource.RLIMIT_CORE, 0)
    set_limit(resource.RLIMIT_AS, request["memory_mb"] << 20)
    set_limit(resource.RLIMIT_FSIZE, max(all_outputs, largest_input))
    set_limit(resource.RLIMIT_NOFILE, MOST_DESCRIPTORS)
    if request["uid"] is not None:
        become_user(request["uid"])
    # Where `ulimit -s` is more than the memory, no thread would start.
    threading.stack_size(STACK_BYTES)
    # Finds how many tasks its user has. Other containers may hide some, and the limit counts them.
    tasks = bisect.bisect_left(range(MOST_TASKS), True, key=can_start_a_thread)
    if tasks == 0:
        raise OSError("threads cannot be limited: this is root, without rights to change the user")
    limit_tasks(tasks + THREADS, for_good=True)
    os.environ.clear()


def set_limit(limit: int, value: int) -> None:
    """Set a limit that cannot be raised again."""
    resource.setrlimit(limit, (value, value))


def become_user(uid: int) -> None:
    """Become another user than root for good.

    Raises:
        OSError: this root may not, or that user could not read Python's library.
    """
    try:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    except PermissionError:
        raise OSError("root lacks CAP_SETUID and CAP_SETGID to run it as another user") from None
    # A program may import what the prelude does not.
    with open(os.__file__):
        pass


def limit_tasks(most: int, for_good: bool = False) -> None:
    """Set how many tasks this user may have; unless `for_good`, it can be raised again."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    if for_good:
        hard = most
    resource.setrlimit(resource.RLIMIT_NPROC, (most, hard))


def can_start_a_thread(most_tasks: int) -> bool:
    """Whether a thread starts where this user may have so many tasks."""
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
    stdin = os.memfd_create("input")
    output = os.memfd_create("output")
    if not request["function"]:
        os.write(stdin, test["input"].encode())
        os.lseek(stdin, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        os.close(request["caller"])
        become_the_program(request, stdin, output)
        readable = list(request["readable"])
        readable.append(f"{sys.base_prefix}/lib")
        readable.append(f"{sys.base_prefix}/lib64")
        lock(readable, request["folder"], request["landlock"])
        execute(request, test, namespace)
        # It ends as any program does: after its threads, `atexit` and buffers.
        sys.exit(0)
    wait(child, request["caller"], request["folder"])
    _, status = os.waitpid(child, 0)
    os.lseek(output, 0, os.SEEK_SET)
    text = os.read(output, request["output_bytes"])
    os.close(stdin)
    os.close(output)
    if not os.WIFEXITED(status):
        return STOPPED, b""
    if os.WEXITSTATUS(status) != 0:
        return FAILED, b""
    if request["function"] and not text:
        # A function that ends the process returns nothing.
        return FAILED, b""
    return FINISHED, text


def wait(child: int, caller: int, folder: "str | None") -> None:
    """Wait for the end of the child; end with the caller, and then the child ends too.

    The signal of a parent's death would not do: it is lost when the user changes, and would also
    come when a thread of the caller ends. A child that makes too many files is ended.

    Args:
        folder: the one that the child may write to, a file system of its own; None for none.
    """
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(caller, select.POLLIN)
    milliseconds = None
    if folder is not None:
        milliseconds = SECONDS_BETWEEN_LOOKS * 1000
    while True:
        ended = dict(poll.poll(milliseconds))
        if caller in ended:
            os._exit(1)
        if handle in ended:
            break
        if folder is not None and files_in(folder) > MOST_FILES:
            # It is not waited for yet, so this is its id.
            os.kill(child, signal.SIGKILL)
            # There is nothing more to look for.
            folder = None
            milliseconds = None
    os.close(handle)


def files_in(folder: str) -> int:
    """Return how many files and folders a file system has, with those that are removed and open."""
    status = os.statvfs(folder)
    return status.f_files - status.f_ffree


def become_the_program(request: Any, stdin: int, output: int) -> None:
    """In the child: only the program's own files stay open, and tighter limits hold."""
    # The same program gives the same output, unless it reads the clock.
    random.seed(0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(stdin, 0)
    if request["function"]:
        # The output is the result alone, so what the function prints goes nowhere.
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        os.dup2(output, RESULT)
        os.closerange(RESULT + 1, MOST_DESCRIPTORS)
    else:
        os.dup2(output, 1)
        os.dup2(nothing, 2)
        os.closerange(3, MOST_DESCRIPTORS)
    set_limit(resource.RLIMIT_FSIZE, request["output_bytes"])
    set_limit(resource.RLIMIT_CPU, request["cpu_seconds"])


def execute(request: Any, test: Any, namespace: Any) -> None:
    """Run the program, then its function if it has one."""
    name = request["function"]
    exec(compile(request["program"], "program.py", "exec"), namespace)
    if not name:
        return
    # A method comes first, because the prelude has functions of such names as `merge`.
    if hasattr(namespace.get("Solution"), name):
        function = getattr(namespace["Solution"](), name)
    else:
        function = namespace[name]
    value = function(*test["args"], **test["kwargs"])
    try:
        text = json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError):
        text = NOT_JSON
    with open(RESULT, "wb") as file:
        file.write(text)
    os._exit(0)
