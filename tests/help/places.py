"""Runs `tests/run.sh` in many places: long base folders, odd paths, other users, other settings.

    python tests/help/places.py [--only WORD] [--minutes N] [-- PYTEST'S ARGUMENTS]

Each place is a clean clone of this commit, in which two or more things differ from the usual.
`--only space` runs the places whose name holds "space". It takes two cores for as long as all these
runs do, and ends with a line for each.

As root it makes a user for the places of another user, and removes it. "Without bubblewrap" means
a PATH of links to all programs but it. `setup_env.sh` installs an environment in each place, from
this user's cache of pip.
"""

import argparse
import contextlib
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from repository import REPO

USER = "verl-gdpo-places"
HIDDEN = ("bwrap",)


@dataclass(frozen=True)
class Place:
    """base: the length of the base folder's path; None: drawn by `tests/run.sh`."""

    name: str
    base: int | None = None
    checkout: str = "checkout"
    mode: int = 0o755
    other_user: bool = False
    has_bubblewrap: bool = True
    settings: tuple[tuple[str, str], ...] = ()


TMPDIR = (("TMPDIR", "{place}/t"),)
C = (("LANG", "C"), ("LC_ALL", "C"))
WIDE, NARROW = (("COLUMNS", "200"),), (("COLUMNS", "40"),)
PLACES = [
    Place("20, ü, 40 columns, LANG=C", 20, "prüfung", settings=NARROW + C),
    Place("37, space, other user", 37, "a place", other_user=True, settings=WIDE),
    Place("38, mode 700, TMPDIR", 38, mode=0o700, settings=TMPDIR),
    Place("60, other user without bubblewrap", 60, other_user=True, has_bubblewrap=False),
    Place("120, space, 40 columns", 120, "a place", settings=NARROW),
]


@contextlib.contextmanager
def another_user():
    """A user of this machine, who is removed with their home."""
    subprocess.run(["useradd", "--create-home", "--shell", "/bin/bash", USER], check=True)
    try:
        yield pwd.getpwnam(USER)
    finally:
        command = ["userdel", "--force", "--remove", USER]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def without(programs, path, folder):
    """A PATH of links to all programs of this one but these."""
    folder.mkdir()
    for name in path:
        for program in Path(name).glob("*"):
            if program.name not in programs and not (folder / program.name).is_symlink():
                (folder / program.name).symlink_to(program)
    return str(folder)


class Run:
    """One place: its folder, its environment variables and its user."""

    def __init__(self, place, folder, user):
        self.place, self.folder, self.user = place, folder, user
        self.checkout = folder / place.checkout
        folder.mkdir()
        clone = ["git", "clone", "--quiet", "--no-hardlinks", str(REPO), str(self.checkout)]
        subprocess.run(clone, check=True)
        if (REPO / ".mypy_cache").exists():  # it fits what has not changed
            shutil.copytree(REPO / ".mypy_cache", self.checkout / ".mypy_cache")
        (folder / "t").mkdir()
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        self.environment.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
        for name in ("TESTS_BASE_LENGTH", "COLUMNS", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV"):
            self.environment.pop(name, None)
        if place.base:
            self.environment["TESTS_BASE_LENGTH"] = str(place.base)
        for name, value in place.settings:
            self.environment[name] = value.format(place=folder)
        if user:
            self.environment |= {"HOME": user.pw_dir, "USER": user.pw_name}
            self.environment["PATH"] = "/usr/local/bin:/usr/bin:/bin"
        if not place.has_bubblewrap:
            path = self.environment["PATH"].split(os.pathsep)
            self.environment["PATH"] = without(HIDDEN, path, folder / "programs")
        if user:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
        folder.chmod(place.mode)

    def test(self, arguments, log, limit):
        """The exit code of `tests/run.sh`, or "ended" after `limit` seconds."""
        user = self.user
        ids = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "tests/run.sh", *arguments],
                cwd=self.checkout,
                env=self.environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                **ids,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return "ended"
            finally:
                for number in (signal.SIGTERM, signal.SIGKILL):  # the first lets it clean up
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, number)
                        process.wait(20)


def result(place, code, log, seconds):
    """How it ended, with pytest's counts."""
    counts = re.findall(
        r"^=* ?((?:\d+ \w+,? ?)+) in [\d.]+s.*$", log.read_text(errors="replace"), re.M
    )
    how = {0: "passed", "ended": "ended: too long"}.get(code, f"exit code {code}")
    return f"{how} in {seconds:.0f} s, {counts[-1] if counts else 'no counts'}: {place.name}"


def run_all(places, arguments, limit, folder, user):
    lines = []
    for number, place in enumerate(places, 1):
        print(f"== {place.name}: {folder}/{number:02}.log", flush=True)
        begun = time.monotonic()
        run = Run(place, folder / f"{number:02}", user if place.other_user else None)
        log = folder / f"{number:02}.log"
        try:
            code = run.test(arguments, log, limit)
        finally:
            shutil.rmtree(run.folder)
        lines.append(result(place, code, log, time.monotonic() - begun))
        print(lines[-1], flush=True)
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="places with it in the name"
    )
    parser.add_argument("--minutes", type=float, default=60, help="at most, for each place")
    parser.add_argument("arguments", nargs="*", help="of pytest, after --")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the user is removed
    words = given.only or [""]
    places = [place for place in PLACES if any(word in place.name for word in words)]
    is_root = os.getuid() == 0
    if not is_root:
        print("not root: the places of another user are left out", flush=True)
        places = [place for place in places if not place.other_user]
    folder = Path(tempfile.mkdtemp(prefix="vg", dir="/tmp"))
    folder.chmod(0o755)
    makes_user = is_root and any(place.other_user for place in places)
    with another_user() if makes_user else contextlib.nullcontext() as user:
        lines = run_all(places, given.arguments, 60 * given.minutes, folder, user)
    print(f"\nLogs: {folder}", *lines, sep="\n")
    return int(not all(line.startswith("passed ") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
