"""Takes from a process for good what a program needs not: files by Landlock, calls by seccomp.

This file's text runs inside the sandbox, before that of `inside.py`: the standard library
alone. A lock cannot be opened again, and setting it needs no rights.

Landlock says which files may be opened. It knows nothing of chmod, chown, utime and setxattr, and
older kernels know less. So seccomp allows what is listed here and nothing else: no new process, no
socket, no signal to another process, no change of what a file is. What is denied is then the same
with every version of Landlock.
"""

import ctypes
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

# Each call has a name, its number on x86-64, and that on aarch64.
ALLOWED = """
read 0 63, write 1 64, close 3 57, fstat 5 80, stat 4 -, lstat 6 -, newfstatat 262 79,
statx 332 291, lseek 8 62, pread64 17 67, pwrite64 18 68, readv 19 65, writev 20 66,
ftruncate 77 46, fsync 74 82, fdatasync 75 83, fadvise64 221 223, flock 73 32, getdents64 217 61,
access 21 -, faccessat 269 48, readlink 89 -, readlinkat 267 78, getcwd 79 17, chdir 80 49,
fchdir 81 50, umask 95 166, statfs 137 43, fstatfs 138 44, dup 32 23, dup2 33 -, dup3 292 24,
pipe 22 -, pipe2 293 59, sendfile 40 71, copy_file_range 326 285, sendto 44 206, recvfrom 45 207,
shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205, poll 7 -, ppoll 271 73,
select 23 -, pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -,
epoll_pwait 281 22, eventfd2 290 19, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
mremap 25 216, madvise 28 233, futex 202 98, set_robust_list 273 99, rseq 334 293,
sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, nanosleep 35 101,
clock_nanosleep 230 115, clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169,
time 201 -, alarm 37 -, setitimer 38 103, getitimer 36 102, pause 34 -, rt_sigaction 13 134,
rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128, getrandom 318 278,
uname 63 160, sysinfo 99 179, times 100 153, getrusage 98 165, getrlimit 97 163, setrlimit 160 164,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getgroups 115 158, getpgrp 111 -, exit 60 93, exit_group 231 94
"""
# These are allowed too where there is a folder to write to.
OF_FOLDERS = """
unlink 87 -, unlinkat 263 35, mkdir 83 -, mkdirat 258 34, rmdir 84 -, rename 82 -, renameat 264 38,
renameat2 316 276
"""
# These are allowed with the arguments that `_conditions` lists.
CONDITIONAL = """
open 2 -, openat 257 56, clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261,
socketpair 53 199, fcntl 72 25, ioctl 16 29
"""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # How linux/audit.h calls the machines.
# The number of clone3. Libraries do without what came with it or later, if it is not there.
NEWER = 435
CLONE_THREAD = 0x10000
CLONE_NEWS = 0x7E020080
# Commands of fcntl. Those of the owner, who gets signals, are not among them.
DUP_AND_FLAGS_AND_LOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)
# Commands of ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX.
OF_TERMINALS_AND_FLAGS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)

# Operations of a filter, in linux/bpf_common.h.
LOAD = 0x20
AND = 0x54
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
RETURN = 0x06
# What a filter returns, in linux/seccomp.h. The last two are the errors EPERM and ENOSYS.
ALLOW = 0x7FFF0000
KILL = 0x80000000
NOT_PERMITTED = 0x50001
NOT_THERE = 0x50026
# Where a filter finds what it asks for, in struct seccomp_data.
NUMBER_AT = 0
AUDIT_AT = 4
ARGUMENTS_AT = 16

# Rights on files, in linux/landlock.h.
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
MAKE_CHAR = 1 << 6
MAKE_BLOCK = 1 << 11
TRUNCATE = 1 << 14
RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 5: 16}  # {version of Landlock: how many rights it has}
# The numbers of Landlock's calls, on both machines.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446

# Options of prctl.
PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
SIGKILL = 9

STEP_BYTES = 8  # The size of an instruction of a filter.

_libc = ctypes.CDLL(None, use_errno=True)


def lock(readable: Iterable[str], folder: str | None, landlock: int) -> None:
    """Lock this thread, and those that it starts.

    Args:
        readable: folders and files that may be opened for reading.
        folder: the one in which files may be made and written, if there is one.
        landlock: its version. With 0, all files may be read; without a folder too, none written.

    Raises:
        OSError: the kernel refuses.
    """
    # It does not outlive what started it.
    _call(_libc.prctl, PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    # The rest needs this.
    _call(_libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if landlock:
        _lock_files(readable, folder, landlock)
    has_folder = folder is not None
    has_writable = has_folder or landlock > 0
    code = seccomp_filter(os.uname().machine, os.getpid(), has_folder, has_writable)
    text = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // STEP_BYTES, ctypes.addressof(text))
    _call(_libc.prctl, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)


def landlock_version() -> int:
    """Landlock's version on this kernel; 0 where there is none, or where a container forbids it."""
    version = int(_libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1))
    return max(0, version)


def _lock_files(readable: Iterable[str], folder: str | None, version: int) -> None:
    known_version = max(known for known in RIGHTS_OF_VERSION if known <= version)
    handled = (1 << RIGHTS_OF_VERSION[known_version]) - 1
    # What a kernel does not know may not be asked of it.
    tcp = 3 if version >= 4 else 0
    abstract_sockets_and_signals = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", handled, tcp, abstract_sockets_and_signals)
    rules = _call(_libc.syscall, CREATE_RULESET, attributes, ctypes.c_size_t(24), 0)
    for path in readable:
        _add_rule(rules, path, READ_FILE | READ_DIR)
    _add_rule(rules, os.devnull, (READ_FILE | WRITE_FILE | TRUNCATE) & handled)
    if folder is not None:
        _add_rule(rules, folder, handled & ~(EXECUTE | MAKE_CHAR | MAKE_BLOCK))
    _call(_libc.syscall, RESTRICT_SELF, rules, 0)
    os.close(rules)


def _add_rule(rules: int, path: str, rights: int) -> None:
    """Allow the rights on what is there, if anything is."""
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= ~READ_DIR
    rule = struct.pack("=Qi", rights, file)
    _call(_libc.syscall, ADD_RULE, rules, 1, rule, 0)
    os.close(file)


def _call(function: Any, *args: Any) -> int:
    """Return what a C function returns; raise OSError if it fails."""
    result = int(function(*args))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(args[:2]))
    return result


def seccomp_filter(machine: str, pid: int, has_folder: bool, has_writable: bool) -> bytes:
    """The instructions of a filter for the process `pid` on a machine such as "x86_64"."""
    steps = [
        _step(LOAD, AUDIT_AT),
        _step(JUMP_IF_EQUAL, AUDIT[machine], yes=1),
        # A call of 32-bit programs has another number.
        _step(RETURN, KILL),
        _step(LOAD, NUMBER_AT),
    ]
    allowed = list(_numbers(ALLOWED, machine).values())
    if has_folder:
        allowed.extend(_numbers(OF_FOLDERS, machine).values())
    for number in allowed:
        steps.append(_step(JUMP_IF_EQUAL, number, no=1))
        steps.append(_step(RETURN, ALLOW))

    conditions = _conditions(pid, has_writable)
    for name, number in _numbers(CONDITIONAL, machine).items():
        body = []
        for condition in conditions[name]:
            body.extend(_require(condition))
        body.append(_step(RETURN, ALLOW))
        steps.append(_step(JUMP_IF_EQUAL, number, no=len(body)))
        steps.extend(body)

    steps.append(_step(JUMP_IF_AT_LEAST, NEWER, no=1))
    steps.append(_step(RETURN, NOT_THERE))
    steps.append(_step(RETURN, NOT_PERMITTED))
    return b"".join(steps)


class Condition(NamedTuple):
    """What holds of an argument of a call: its masked bits have one of the values.

    argument: which one, from 0.
    """

    argument: int
    mask: int
    values: Sequence[int]


def _conditions(pid: int, has_writable: bool) -> Mapping[str, list[Condition]]:
    """What holds of the arguments of each call."""
    mask: int
    values: tuple[int, ...]
    if has_writable:
        # Landlock before version 3 lets truncate what is opened for reading, or for neither. So
        # only what is opened for writing, which Landlock knows of, may be truncated.
        mask = os.O_ACCMODE | os.O_TRUNC
        values = (
            os.O_RDONLY,
            os.O_WRONLY,
            os.O_RDWR,
            os.O_WRONLY | os.O_TRUNC,
            os.O_RDWR | os.O_TRUNC,
        )
    else:
        mask = os.O_ACCMODE | os.O_TRUNC | os.O_CREAT
        values = (os.O_RDONLY,)
    whole = 0xFFFFFFFF  # All bits that Linux looks at.
    af_unix = 1
    sock_stream = 1
    type_of_socket = 0xF  # The other bits are flags.
    return {
        "open": [Condition(1, mask, values)],
        "openat": [Condition(2, mask, values)],
        "clone": [Condition(0, CLONE_THREAD | CLONE_NEWS, (CLONE_THREAD,))],
        "kill": [Condition(0, whole, (pid,))],
        "tgkill": [Condition(0, whole, (pid,))],
        "prlimit64": [Condition(0, whole, (0, pid))],
        "socketpair": [
            Condition(0, whole, (af_unix,)),
            Condition(1, type_of_socket, (sock_stream,)),
        ],
        "fcntl": [Condition(1, whole, DUP_AND_FLAGS_AND_LOCKS)],
        "ioctl": [Condition(1, whole, OF_TERMINALS_AND_FLAGS)],
    }


def _require(condition: Condition) -> list[bytes]:
    """The instructions after which a filter goes on if the condition holds."""
    steps = [
        _step(LOAD, ARGUMENTS_AT + 8 * condition.argument),
        _step(AND, condition.mask),
    ]
    for place, value in enumerate(condition.values):
        # It jumps over the other values and the return.
        steps.append(_step(JUMP_IF_EQUAL, value, yes=len(condition.values) - place))
    steps.append(_step(RETURN, NOT_PERMITTED))
    return steps


def _numbers(table: str, machine: str) -> dict[str, int]:
    """{call: its number on a machine}, of those calls in a table that the machine has."""
    column = 1 + list(AUDIT).index(machine)
    numbers = {}
    for row in table.split(","):
        cells = row.split()
        if cells[column] != "-":
            numbers[cells[0]] = int(cells[column])
    return numbers


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` are how many it jumps over."""
    return struct.pack("=HBBI", code, yes, no, value)
