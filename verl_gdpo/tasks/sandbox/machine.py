"""What this machine gives to programs: the ways to confine them, and places, one for each core."""

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_gdpo.tasks.sandbox.lock import landlock_version

# A program of root runs as a user of its own, one of so many numbers that no system gives to
# anybody.
FIRST_UID = 1_900_000_000
UIDS = 1 << 24
SCRATCH_BYTES = 64 << 20
# A program prints a set the same way twice, and a thread reserves no memory beside its stack.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
START = ("-SsB", "-X", "utf8")
# What the modules of Python's library load.
READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/urandom")
LACKS_FOLDER = (
    "a program has no folder to write to, and can ask whether a path exists and how large a file is"
)
WEAK = (
    "WEAK: a program can read what every user may read: the command line of the training, and the "
    "expected results in its data"
)
NO_BWRAP = (
    "Install bubblewrap: `apt-get install bubblewrap`, or without rights `conda install -c "
    "conda-forge bubblewrap`"
)
BWRAP_FAILS = (
    "bubblewrap is installed, and this machine does not let it make namespaces. In Docker, start "
    "the container with `--cap-add SYS_ADMIN --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined`. On Slurm or a shared machine, its administrator allows user namespaces: "
    "user.max_user_namespaces is above 0, and where they exist kernel.unprivileged_userns_clone=1 "
    "and kernel.apparmor_restrict_unprivileged_userns=0"
)
NO_LANDLOCK = (
    "Landlock, the second best, needs Linux 5.13 or later with `landlock` in "
    "/sys/kernel/security/lsm, and in a container Docker 23 or later"
)
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # It has "QUOTA PERIOD" of a container, or "max PERIOD".
MODE_OF_PLACES = "drwx------"
LOOK_SECONDS = 0.05  # The time between two looks at what somebody waits for.


class SandboxError(OSError):
    """This machine cannot run the program. It says nothing about the program."""


@dataclass(frozen=True)
class Confinement:
    """One way to run a program. In each, seccomp allows it few calls: `lock.py`.

    name: "bubblewrap", "landlock" or "weak".
    command: what starts Python, which then runs `inside.py`.
    landlock: the version of Landlock to use; 0 for none.
    folder: the folder that a program may write to, if it has one.
    readable: what it may read besides Python itself, as far as Landlock decides.
    files: descriptors that the command names.
    lacks: what it cannot prevent or give; "" for the best.
    """

    name: str
    command: tuple[str, ...]
    landlock: int = 0
    folder: str | None = None
    readable: tuple[str, ...] = ()
    files: tuple[int, ...] = ()
    lacks: str = ""

    def warning(self) -> str:
        """What it lacks, and what to do about it; "" for the best."""
        if not self.lacks:
            return ""
        return f"sandbox {self.name!r}: {self.lacks}. {advice()}"


def confinements(allow_weak: bool = False) -> Iterator[Confinement]:
    """What may work on this machine; whether it does is found by trying."""
    landlock = landlock_version()
    bwrap = shutil.which("bwrap")
    if bwrap:
        yield Confinement(
            "bubblewrap",
            _bubblewrap(bwrap),
            landlock=landlock,
            folder="/tmp",
            readable=("/",),
        )
    prefix = _prefix()
    python = os.path.relpath(Path(sys.executable).resolve(), Path(sys.base_prefix).resolve())
    command = (f"/proc/self/fd/{prefix}/{python}", *START)
    if landlock:
        yield Confinement(
            "landlock",
            command,
            landlock=landlock,
            readable=READABLE,
            files=(prefix,),
            lacks=LACKS_FOLDER,
        )
    if allow_weak and can_change_user():
        yield Confinement("weak", command, files=(prefix,), lacks=f"{WEAK}; {LACKS_FOLDER}")


def advice() -> str:
    """What a person can do for a better sandbox than this machine has."""
    sentences = []
    if shutil.which("bwrap"):
        sentences.append(BWRAP_FAILS)
    else:
        sentences.append(NO_BWRAP)
    if not landlock_version():
        sentences.append(NO_LANDLOCK)
    return ". ".join(sentences)


def can_change_user() -> bool:
    """Whether this is root, and not that of a container whose other users do not exist outside."""
    # The first line has the first user in here, its number outside, and how many follow it.
    line = Path("/proc/self/uid_map").read_text().split()
    end_of_users = int(line[0]) + int(line[2])
    return os.getuid() == 0 and end_of_users >= FIRST_UID + UIDS


@functools.cache
def _prefix() -> int:
    """Python's folder, opened: its own user may reach it where a program's user may not.

    A number that `inside.py` does not close. It stays open as long as this process lives.
    """
    file = os.open(sys.base_prefix, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 64)
    os.close(file)
    return number


def _bubblewrap(bwrap: str) -> tuple[str, ...]:
    """Only Python and the system's libraries are there, and one small folder can be written to."""
    python = Path(sys.executable).resolve()
    base = Path(sys.base_prefix)
    inside = f"/python/bin/{python.name}"
    command = [bwrap, "--die-with-parent"]

    # Root needs no user namespace. In one, the program's user would still be root outside, for whom
    # the limit of processes does not hold.
    if not can_change_user():
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    command += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]

    # Folders on the way are root's alone, unless they are made here.
    command += ["--perms", "0755", "--dir", "/usr"]
    command += ["--ro-bind", "/usr/lib", "/usr/lib"]
    command += ["--ro-bind-try", "/usr/lib64", "/usr/lib64"]
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            command += ["--symlink", os.readlink(folder), folder]
        else:
            command += ["--ro-bind-try", folder, folder]

    command += ["--perms", "0755", "--dir", "/python"]
    command += ["--perms", "0755", "--dir", "/python/bin"]
    command += ["--ro-bind", str(base / "lib"), "/python/lib"]
    command += ["--ro-bind-try", str(base / "lib64"), "/python/lib64"]
    command += ["--ro-bind", str(python), inside]

    command += ["--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp"]
    command += ["--chdir", "/tmp"]
    command += ["--remount-ro", "/"]
    command += ["--setenv", "LD_LIBRARY_PATH", "/python/lib"]
    command.append(inside)
    command.extend(START)
    return tuple(command)


@contextlib.contextmanager
def place() -> Iterator[None]:
    """One of as many places as there are cores, shared by all processes of this user.

    Raises:
        SandboxError: somebody else has made the folder of the places, or can write to it.
    """
    names = [str(number) for number in range(cores())]
    with _looking:
        folder = _folder()
        try:
            mine = _free_place(names, folder)
            while mine is None:
                time.sleep(LOOK_SECONDS)
                mine = _free_place(names, folder)
        finally:
            os.close(folder)
    try:
        yield
    finally:
        # Else it would stay locked as long as a process lives that was forked meanwhile.
        fcntl.flock(mine, fcntl.LOCK_UN)
        os.close(mine)


def cores() -> int:
    """How many this process may use: those of its affinity, or its container's share of them."""
    here = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, CPU_MAX.read_text().split())
        here = max(1, min(here, quota // period))
    return here


# One thread of a process looks for a place, and the others wait for that thread.
_looking = threading.Lock()


def _folder() -> int:
    """The folder of the places, opened."""
    # Where our launcher has started a run, TMPDIR belongs to that run alone.
    around = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    me = os.getuid()
    path = Path(around) / f"verl-gdpo-sandboxes-{me}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = _open(str(path), os.O_PATH)
    status = os.fstat(folder)
    mode = stat.filemode(status.st_mode)
    if status.st_uid != me or mode != MODE_OF_PLACES:
        os.close(folder)
        raise SandboxError(
            f"{path}: got {mode} of user {status.st_uid}; expected {MODE_OF_PLACES} of user {me}. "
            "Remove it, or set TMPDIR to a folder of your own"
        )
    return folder


def _free_place(names: Iterable[str], folder: int) -> int | None:
    """The first file that nobody else has locked, opened and locked; None if there is none."""
    for name in names:
        file = _open(name, os.O_RDWR | os.O_CREAT, folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            os.close(file)
    return None


def _open(path: str, flags: int, folder: int | None = None) -> int:
    """Open what is no link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
