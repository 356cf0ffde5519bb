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

# programs of root run as a user of their own, from numbers that no system gives to anybody
FIRST_UID, UIDS = 1_900_000_000, 1 << 24
SCRATCH_BYTES = 64 << 20
# a program prints a set the same way twice, and a thread reserves no memory beside its stack
ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
START = ("-SsB", "-X", "utf8")
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
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")  # "QUOTA PERIOD" of a container, or "max PERIOD"
LOOK_SECONDS = 0.05  # between two looks at what somebody waits for


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
        return f"sandbox {self.name!r}: {self.lacks}. {advice()}" if self.lacks else ""


def confinements(allow_weak: bool = False) -> Iterator[Confinement]:
    """What may work on this machine; whether it does is found by trying."""
    landlock = landlock_version()
    bwrap = shutil.which("bwrap")
    if bwrap:
        yield Confinement("bubblewrap", _bubblewrap(bwrap), landlock, "/tmp", ("/",))
    prefix = _prefix()
    python = os.path.relpath(Path(sys.executable).resolve(), Path(sys.base_prefix).resolve())
    command = (f"/proc/self/fd/{prefix}/{python}", *START)
    # libraries that Python's modules load
    readable = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/urandom")
    if landlock:
        yield Confinement("landlock", command, landlock, None, readable, (prefix,), LACKS_FOLDER)
    if allow_weak and can_change_user():
        yield Confinement("weak", command, files=(prefix,), lacks=f"{WEAK}; {LACKS_FOLDER}")


def advice() -> str:
    """What a person can do for a better sandbox than this machine has."""
    sentences = [BWRAP_FAILS if shutil.which("bwrap") else NO_BWRAP]
    if not landlock_version():
        sentences.append(NO_LANDLOCK)
    return ". ".join(sentences)


def can_change_user() -> bool:
    """Whether this is root, and not that of a container whose other users do not exist outside."""
    first, _, count = map(int, Path("/proc/self/uid_map").read_text().split()[:3])
    return os.getuid() == 0 and first + count >= FIRST_UID + UIDS


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
    python, base = Path(sys.executable).resolve(), Path(sys.base_prefix)
    inside = f"/python/bin/{python.name}"
    # as root without a user namespace: in one, the program's user would still be root outside, for
    # whom the limit of processes does not hold
    user = () if can_change_user() else ("--unshare-user", "--uid", "65534", "--gid", "65534")
    # folders on the way are root's alone, unless they are made here
    libraries: list[str] = []
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            libraries += ["--symlink", os.readlink(folder), folder]
        else:
            libraries += ["--ro-bind-try", folder, folder]
    return (
        *(bwrap, "--die-with-parent", *user),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--perms", "0755", "--dir", "/usr", "--ro-bind", "/usr/lib", "/usr/lib"),
        *("--ro-bind-try", "/usr/lib64", "/usr/lib64", *libraries),
        *("--perms", "0755", "--dir", "/python", "--perms", "0755", "--dir", "/python/bin"),
        *("--ro-bind", str(base / "lib"), "/python/lib"),
        *("--ro-bind-try", str(base / "lib64"), "/python/lib64"),
        *("--ro-bind", str(python), inside),
        *("--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/"),
        *("--setenv", "LD_LIBRARY_PATH", "/python/lib"),
        *(inside, *START),
    )


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
            while (mine := _free_place(names, folder)) is None:
                time.sleep(LOOK_SECONDS)
        finally:
            os.close(folder)
    try:
        yield
    finally:
        # else it stays locked as long as a process that was forked meanwhile
        fcntl.flock(mine, fcntl.LOCK_UN)
        os.close(mine)


def cores() -> int:
    """How many this process may use: those of its affinity, or its container's share of them."""
    here = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = map(int, CPU_MAX.read_text().split())
        here = max(1, min(here, quota // period))
    return here


_looking = threading.Lock()  # one thread of a process looks for a place, and the others for it


def _folder() -> int:
    """The folder of the places, opened."""
    # TMPDIR belongs to one run, where our launcher has started it
    around = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    path = Path(around) / f"verl-gdpo-sandboxes-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    folder = _open(str(path), os.O_PATH)
    status, mine = os.fstat(folder), (os.getuid(), "drwx------")
    if (status.st_uid, stat.filemode(status.st_mode)) != mine:
        os.close(folder)
        raise SandboxError(
            f"{path}: got {stat.filemode(status.st_mode)} of user {status.st_uid}; expected "
            f"{mine[1]} of user {mine[0]}. Remove it, or set TMPDIR to a folder of your own"
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
