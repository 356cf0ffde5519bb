"""What the lock of the sandbox says of each call, and what honest programs need of it."""

import os
import struct
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from of_machine import confinement_of

from verl_gdpo.tasks import sandbox
from verl_gdpo.tasks.sandbox import run
from verl_gdpo.tasks.sandbox.lock import (
    ALLOW,
    ALLOWED,
    CONDITIONAL,
    KILL,
    NOT_PERMITTED,
    NOT_THERE,
    OF_FOLDERS,
    seccomp_filter,
)

PID = 4711
X86, ARM = ("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)


def answer(code, number, *arguments, audit):
    """What the kernel does with a call: seccomp's filter, instruction by instruction."""
    data = struct.pack("=iIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    at, value = 0, 0
    while True:
        operation, yes, no, constant = struct.unpack_from("=HBBI", code, at * 8)
        at += 1
        match operation:
            case 0x20:  # load
                (value,) = struct.unpack_from("=I", data, constant)
            case 0x54:  # and
                value &= constant
            case 0x15:  # equal
                at += yes if value == constant else no
            case 0x35:  # at least
                at += yes if value >= constant else no
            case 0x06:
                return constant


def numbers(table, column):
    rows = [row.split() for row in table.split(",")]
    return {int(row[column]): row[0] for row in rows if row[column] != "-"}


@pytest.mark.parametrize(("machine", "column"), [(X86, 1), (ARM, 2)])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_call_that_is_not_listed_is_denied(machine, column, has_folder):
    """Each call that there may be, and each of x32, whose numbers have one bit more."""
    code = seccomp_filter(machine[0], PID, has_folder, True)
    table = ALLOWED + ("," + OF_FOLDERS) * has_folder
    listed, conditional = numbers(table, column), numbers(CONDITIONAL, column)
    assert len(listed) > 80 and len(code) // 8 <= 4096
    for number in range(1000):
        if number not in conditional:
            denied = NOT_THERE if number >= 435 else NOT_PERMITTED
            expected = ALLOW if number in listed else denied
            assert answer(code, number, audit=machine[1]) == expected, number
        x32 = answer(code, number | 0x40000000, PID, 1, 1, audit=machine[1])
        assert x32 == NOT_THERE
        assert answer(code, number, audit=0x40000003) == KILL  # 32-bit x86
        assert answer(code, number, audit=0x40000028) == KILL  # 32-bit Arm


THREAD = 0x3D0F00  # what glibc's pthread_create asks for
RDONLY, WRONLY, RDWR, NEITHER = range(4)
CONDITIONS = {
    "clone": [(True, [THREAD]), (True, [0x7D0F00]), (False, [17]), (False, [0x4111]), (False, [0])]
    + [(False, [flags | kind]) for flags in (17, THREAD) for kind in (0x80, 1 << 17, 1 << 25)]
    + [(False, [flags | 1 << bit]) for flags in (17, THREAD) for bit in range(26, 31)],
    "kill": [(True, [PID, 9]), *[(False, [pid, 9]) for pid in (0, 1, PID - 1, 2**32 - PID)]],
    "tgkill": [(True, [PID, 5, 9]), (False, [PID - 1, 5, 9])],
    "prlimit64": [(True, [0, 1]), (True, [PID, 1]), (False, [PID - 1, 1])],
    "socketpair": [(True, [1, 1]), (True, [1, 0x80801]), (False, [1, 2]), (False, [2, 1])],
    "fcntl": [(True, [5, 1030]), (False, [5, 8]), (False, [5, 10]), (False, [5, 15])],
    "ioctl": [(True, [0, 0x5401]), (False, [0, 0x5412]), (False, [0, 0x8901])],
    "openat": [
        (True, [0, 0, os.O_RDONLY | os.O_CLOEXEC]),
        *[(True, [0, 0, how | os.O_CREAT | os.O_TRUNC]) for how in (WRONLY, RDWR)],
        *[(False, [0, 0, how | os.O_TRUNC]) for how in (RDONLY, NEITHER)],
        (False, [0, 0, NEITHER]),
    ],
}


@pytest.mark.parametrize(("machine", "column"), [(X86, 1), (ARM, 2)])
@pytest.mark.parametrize("name", CONDITIONS)
def test_what_is_allowed_of_a_call(machine, column, name):
    code = seccomp_filter(machine[0], PID, False, True)
    number = {name: number for number, name in numbers(CONDITIONAL, column).items()}[name]
    for is_allowed, arguments in CONDITIONS[name]:
        expected = ALLOW if is_allowed else NOT_PERMITTED
        assert answer(code, number, *arguments, audit=machine[1]) == expected, arguments


@pytest.mark.parametrize(("machine", "number"), [(X86, 257), (ARM, 56)])
def test_without_landlock_and_a_folder_nothing_is_opened_to_write(machine, number):
    code = seccomp_filter(machine[0], PID, False, False)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_RDWR | os.O_TMPFILE):
        assert answer(code, number, 0, 0, flags, audit=machine[1]) == NOT_PERMITTED
    assert answer(code, number, 0, 0, os.O_CLOEXEC, audit=machine[1]) == ALLOW


@pytest.fixture
def open_to_all():
    """A folder, also where only this user may read what is in TMPDIR."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.parametrize("landlock", [1, 2, 3, 4, 5, 6])
def test_what_may_be_read_cannot_be_emptied(open_to_all, landlock):
    """Python's own files may be the user's; Landlock before version 3 does not see truncation."""
    file = open_to_all / "file"
    file.write_text("whole")
    file.chmod(0o666)
    kind = confinement_of("landlock")
    kind = replace(kind, landlock=landlock, readable=(*kind.readable, str(open_to_all)))
    program = (
        "import os\n"
        "path = input()\n"
        "print(open(path).read())\n"
        "for flags in (os.O_RDONLY, 3, os.O_WRONLY, os.O_RDWR):\n"
        "    try: os.open(path, flags | os.O_TRUNC); print('open')\n"
        "    except OSError: pass\n"
        "try: os.truncate(path, 0); print('truncated')\n"
        "except OSError: pass"
    )
    with mock.patch.object(sandbox, "_confinement", lambda *_: kind):
        assert run(program, [{"input": str(file)}]) == [sandbox.TestResult(True, "whole\n")]
    assert file.read_text() == "whole"


HONEST = {  # {what a program needs, and what it prints: its text}
    "modules: 1": "import bz2, ctypes, decimal, hashlib, lzma, sqlite3, ssl, uuid, zlib\nprint(1)",
    f"the version: {sys.version}": "import sys\nprint(sys.version)",
    "a deep thread: 20000": (
        "import sys, threading\n"
        "threading.stack_size(1 << 26)\n"
        "def f(n): return n and 1 + f(n - 1)\n"
        "sys.setrecursionlimit(1 << 20)\n"
        "thread = threading.Thread(target=lambda: print(f(20_000))); thread.start(); thread.join()"
    ),
    "asyncio: 7": (
        "import asyncio\n"
        "async def f():\n"
        "    queue = asyncio.Queue()\n"
        "    asyncio.get_running_loop().call_later(0.01, queue.put_nowait, 3)\n"
        "    return await queue.get() + await asyncio.to_thread(int, '4')\n"
        "print(asyncio.run(f()))"
    ),
    "a pair of sockets: b'x'": (
        "import socket\n"
        "one, other = socket.socketpair()\n"
        "one.sendall(b'x'); print(other.recv(9))"
    ),
    "a pipe: b'x'": "import os\nr, w = os.pipe(); os.write(w, b'x'); print(os.read(r, 9))",
    "an alarm: late": (
        "import signal, time\n"
        "def late(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, late); signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "try: time.sleep(60)\n"
        "except TimeoutError: print('late')"
    ),
    "a signal to itself: got got got": (
        "import os, signal, threading\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('got'))\n"
        "os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)\n"
        "signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)"
    ),
    "limits: set": (
        "import resource\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_STACK)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (1 << 23, hard)); print('set')"
    ),
    "errors away: ":
        "import os, sys\nsys.stderr = open(os.devnull, 'w'); print(1, file=sys.stderr)",
    "large numbers: 9543":
        "import sys\nsys.set_int_max_str_digits(0); print(len(str(3 ** 20_000)))",
    "time: True":
        "import time, datetime\nprint(time.localtime()[0] == datetime.datetime.now().year)",
    "fast input: b'ab\\n' 0": "import os\nprint(os.read(0, 99)[:3], len(open(0).read()))",
    "mapped input: b'ab'": "import mmap\nprint(mmap.mmap(0, 0, prot=mmap.PROT_READ)[:2])",
    "randomness: 16":
        "import os, random, secrets\nprint(len(os.urandom(8) + secrets.token_bytes(8)))",
    "how many cores: True True":
        "import os\nprint(os.cpu_count() > 0, len(os.sched_getaffinity(0)) > 0)",
    "the end: before": "print('before')\nquit()",
    "a closure for C: 3": (
        "import ctypes\n"
        "call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1); print(call(2))"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["bubblewrap", "bubblewrap 0", "landlock", "landlock 1"])
def test_honest_programs(name):
    """As they run without a sandbox."""
    kind = confinement_of(name)
    results, expected = {}, {}
    with mock.patch.object(sandbox, "_confinement", lambda *_: kind):
        for what, code in HONEST.items():
            needed, _, printed = what.partition(": ")
            (result,) = run(code, [{"input": f"ab\n{'c' * 9}" if "input" in needed else ""}])
            results[needed] = result.finished, result.output.split()
            expected[needed] = True, printed.split()
    assert results == expected
