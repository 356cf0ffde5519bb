"""The ways in which this machine may confine a program, the best one first."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# programs of root run as a user of their own, from numbers that no system gives to anybody
FIRST_UID, UIDS = 1_900_000_000, 1 << 24
SCRATCH_BYTES = 64 << 20
PROCESSES = 8  # of a program, its threads and what runs it
HASHSEED = ("PYTHONHASHSEED", "0")  # a program that prints a set prints it the same way twice
EVERYBODYS_FILES = "a program can read files that every user may read, and write where all may"
OWN_FILES = "a program runs as this user: it can read and write the user's files"
NETWORK = "a program can reach the network"
SCRATCH = "how much a program writes into its scratch folder is bounded for each file alone"
PROCESSES_OF_USER = (
    "a program can end this user's processes, and by ending the one that runs it, outlive it; it "
    "cannot start a thread"
)


@dataclass(frozen=True)
class Kind:
    """One way to run a program.

    name: "bubblewrap", "unshare" or "limits".
    command: what starts Python, which then runs `sandbox_inside.py`.
    lacks: what it cannot prevent; empty for the best.
    has_scratch: it brings a scratch folder of its own.
    is_alone: the program's user has no other process, so that the number of processes can be
        limited; else none but the first is allowed.
    """

    name: str
    command: tuple[str, ...]
    lacks: tuple[str, ...]
    has_scratch: bool = False
    is_alone: bool = True


def kinds() -> Iterator[Kind]:
    """What may work on this machine; whether it does is found by trying."""
    is_root = os.getuid() == 0
    bwrap, unshare = shutil.which("bwrap"), shutil.which("unshare")
    if bwrap:
        yield Kind("bubblewrap", _bubblewrap(bwrap, is_root), (), has_scratch=True)
    files = EVERYBODYS_FILES if is_root else OWN_FILES
    for python in _pythons(is_root):
        start = (python, "-SsB", "-X", "utf8")
        if unshare:
            namespaces = ("--net", "--ipc", "--pid", "--fork", "--kill-child")
            user = () if is_root else ("--user",)
            yield Kind("unshare", (unshare, *user, *namespaces, *start), (files, SCRATCH))
    for python in _pythons(is_root):
        start = (python, "-SsB", "-X", "utf8")
        others = () if is_root else (PROCESSES_OF_USER,)
        yield Kind("limits", start, (files, SCRATCH, NETWORK, *others), is_alone=is_root)


def _bubblewrap(bwrap: str, is_root: bool) -> tuple[str, ...]:
    """Only Python and the system's libraries are there, and one small folder can be written to."""
    python, base = Path(sys.executable).resolve(), Path(sys.base_prefix)
    inside = f"/python/bin/{python.name}"
    # as root without a user namespace: in one, the program's user would still be root outside, for
    # whom the limit of processes does not hold
    user = () if is_root else ("--unshare-user", "--uid", "65534", "--gid", "65534")
    libraries: list[str] = ["--ro-bind", "/usr/lib", "/usr/lib"]
    libraries += ["--ro-bind-try", "/usr/lib64", "/usr/lib64"]
    for folder in ("/lib", "/lib64"):
        if os.path.islink(folder):
            libraries += ["--symlink", os.readlink(folder), folder]
        else:
            libraries += ["--ro-bind-try", folder, folder]
    return (
        *(bwrap, "--die-with-parent", *user),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *libraries,
        *("--perms", "0755", "--dir", "/python", "--perms", "0755", "--dir", "/python/bin"),
        *("--ro-bind", str(base / "lib"), "/python/lib"),
        *("--ro-bind-try", str(base / "lib64"), "/python/lib64"),
        *("--ro-bind", str(python), inside),
        *("--dev", "/dev", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"),
        *("--remount-ro", "/"),
        *("--clearenv", "--setenv", *HASHSEED, "--setenv", "LD_LIBRARY_PATH", "/python/lib"),
        *(inside, "-SsB", "-X", "utf8"),
    )


def _pythons(is_root: bool) -> Iterator[str]:
    """This Python and, in case another user cannot read its files, the machine's."""
    yield str(Path(sys.executable).resolve())
    of_machine = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin")
    if is_root and of_machine:
        yield of_machine
