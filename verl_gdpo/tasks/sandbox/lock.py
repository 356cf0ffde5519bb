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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# name, number on x86-64, number on aarch64
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
# where there is a folder to write to
OF_FOLDERS = """
unlink 87 -, unlinkat 263 35, mkdir 83 -, mkdirat 258 34, rmdir 84 -, rename 82 -, renameat 264 38,
renameat2 316 276
"""
# with the arguments that `_conditions` allows
CONDITIONAL = """
open 2 -, openat 257 56, clone 56 220, kill 62 129, tgkill 234 131, prlimit64 302 261,
socketpair 53 199, fcntl 72 25, ioctl 16 29
"""
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # how linux/audit.h calls them
NEWER = 435  # clone3; libraries do without what came with it or later, if it is not there
CLONE_THREAD, CLONE_NEWS = 0x10000, 0x7E020080
DUP_AND_FLAGS_AND_LOCKS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030)  # no owner, who gets signals
IS_TERMINAL, WIDTH, NREAD, NONBLOCKING, INHERITED = 0x5401, 0x5413, 0x541B, 0x5421, (0x5450, 0x5451)
LOAD, JUMP_IF_EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06  # linux/bpf_common.h
ALLOW, KILL, NOT_PERMITTED, NOT_THERE = 0x7FFF0000, 0x80000000, 0x50001, 0x50026
JUMP_IF_AT_LEAST = 0x35
NUMBER_AT, AUDIT_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14  # linux/landlock.h
EXECUTE, MAKE_CHAR, MAKE_BLOCK = 1 << 0, 1 << 6, 1 << 11
RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 5: 16}  # so many bits
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446

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
    _call(_libc.prctl, 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: it does not outlive what started it
    _call(_libc.prctl, 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, which the rest needs
    if landlock:
        _lock_files(readable, folder, landlock)
    has_writable = folder is not None or landlock > 0
    code = seccomp_filter(os.uname().machine, os.getpid(), folder is not None, has_writable)
    text = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(text))
    _call(_libc.prctl, 22, 2, program, 0, 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def landlock_version() -> int:
    """Landlock's version on this kernel; 0 where there is none, or where a container forbids it."""
    return max(0, int(_libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def _lock_files(readable: Iterable[str], folder: str | None, version: int) -> None:
    bits = RIGHTS_OF_VERSION[max(known for known in RIGHTS_OF_VERSION if known <= version)]
    handled = (1 << bits) - 1
    # TCP from version 4, abstract sockets and signals from version 6
    attributes = struct.pack("QQQ", handled, 3 * (version >= 4), 3 * (version >= 6))
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
    _call(_libc.syscall, ADD_RULE, rules, 1, struct.pack("=Qi", rights, file), 0)
    os.close(file)


def _call(function: Any, *args: Any) -> int:
    result = int(function(*args))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(args[:2]))
    return result


def seccomp_filter(machine: str, pid: int, has_folder: bool, has_writable: bool) -> bytes:
    """The instructions of a filter for the process `pid` on a machine such as "x86_64"."""
    steps = [
        _step(LOAD, AUDIT_AT),
        _step(JUMP_IF_EQUAL, AUDIT[machine], yes=1),
        _step(RETURN, KILL),  # a call of 32-bit programs has another number
        _step(LOAD, NUMBER_AT),
    ]
    for number in _numbers(ALLOWED + ("," + OF_FOLDERS) * has_folder, machine).values():
        steps += [_step(JUMP_IF_EQUAL, number, no=1), _step(RETURN, ALLOW)]
    conditions = _conditions(pid, has_writable)
    for name, number in _numbers(CONDITIONAL, machine).items():
        body = [step for condition in conditions[name] for step in _require(*condition)]
        steps += [_step(JUMP_IF_EQUAL, number, no=len(body) + 1), *body, _step(RETURN, ALLOW)]
    steps += [_step(JUMP_IF_AT_LEAST, NEWER, no=1), _step(RETURN, NOT_THERE)]
    return b"".join([*steps, _step(RETURN, NOT_PERMITTED)])


def _conditions(pid: int, has_writable: bool) -> Mapping[str, list[tuple[int, int, Sequence[int]]]]:
    """Of each call, what holds of its arguments: (which one, mask, values)."""
    # Landlock before version 3 lets truncate what is opened for reading, or for neither
    may_write = (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDWR | os.O_TRUNC)
    opened: tuple[int, tuple[int, ...]]
    if has_writable:
        opened = (os.O_ACCMODE | os.O_TRUNC, (os.O_RDONLY, *may_write))
    else:
        opened = (os.O_ACCMODE | os.O_TRUNC | os.O_CREAT, (os.O_RDONLY,))
    whole = 0xFFFFFFFF  # all that Linux looks at
    return {
        "open": [(1, *opened)],
        "openat": [(2, *opened)],
        "clone": [(0, CLONE_THREAD | CLONE_NEWS, (CLONE_THREAD,))],
        "kill": [(0, whole, (pid,))],
        "tgkill": [(0, whole, (pid,))],
        "prlimit64": [(0, whole, (0, pid))],
        "socketpair": [(0, whole, (1,)), (1, 0xF, (1,))],  # AF_UNIX, SOCK_STREAM
        "fcntl": [(1, whole, DUP_AND_FLAGS_AND_LOCKS)],
        "ioctl": [(1, whole, (IS_TERMINAL, WIDTH, NREAD, NONBLOCKING, *INHERITED))],
    }


def _require(argument: int, mask: int, values: Sequence[int]) -> Iterator[bytes]:
    """Go on after these instructions if the argument has one of the values."""
    yield _step(LOAD, ARGUMENTS_AT + 8 * argument)
    yield _step(AND, mask)
    for place, value in enumerate(values):
        yield _step(JUMP_IF_EQUAL, value, yes=len(values) - place)
    yield _step(RETURN, NOT_PERMITTED)


def _numbers(table: str, machine: str) -> dict[str, int]:
    rows = [row.split() for row in table.split(",")]
    column = 1 + [*AUDIT].index(machine)
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
