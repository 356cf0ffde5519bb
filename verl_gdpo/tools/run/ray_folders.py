"""Says which folders of its own Ray cannot write here, and which variable to set.

    python3 verl_gdpo/tools/run/ray_folders.py key=value ...

prints that, and exits with `DENIED`. `run.sh` asks before an environment is made, so this file
imports the standard library alone. A user id without a name has HOME=/, as in `docker run -u`.

Relies on Ray 2.60: it joins the cluster of RAY_ADDRESS, or of the file `CLUSTER`. Else it makes a
folder in RAY_TMPDIR/ray, or that of TMPDIR or /tmp. Unless RAY_AUTH_MODE says otherwise, it writes
a new token into ~/.ray/auth_token, if there is none and no variable has or names one.
"""

from __future__ import annotations

import os
import pwd
import sys
from collections.abc import Mapping
from pathlib import Path

PREFIX = "ray_kwargs.ray_init."  # of the keys that say where Ray has its folders, or its cluster
DENIED = 3
CLUSTER = "ray_current_cluster"  # in the folder of Ray's sessions


def unwritable(environment: Mapping[str, str], session: str | None = None) -> dict[str, str]:
    """Return {folder: what to do} of those that a new session of Ray cannot write.

    Args:
        environment: the variables of the run.
        session: the folder of Ray's sessions, as `ray_init._temp_dir` has it; None for Ray's own.
    """
    sessions = Path(session or _sessions(environment))
    if joins_cluster(environment, session):
        return {}  # it writes nothing
    answers = {}
    if not _can_make_in(sessions):
        answers[str(sessions)] = (
            f"{sessions}: Ray keeps its sessions in this folder, and you cannot write it, because "
            f"{_reason(sessions)}. Set RAY_TMPDIR to a short folder of your own, such as "
            f"RAY_TMPDIR=/tmp/ray_{os.getuid()}, after mkdir -p"
        )
    set_home = (
        f"Set HOME to a folder of your own, such as HOME=/tmp/home_{os.getuid()}, after mkdir -p"
    )
    home = _home(environment)
    if not _writes_token(environment, home):
        return answers
    if home is None:
        answers["~/.ray"] = f"Ray writes a token into ~/.ray, and you have no HOME. {set_home}"
    elif not _can_make_in(home / ".ray"):
        token = home / ".ray"
        answers[str(token)] = (
            f"{token}: Ray writes a token into this folder of HOME, and you cannot write it, "
            f"because {_reason(token)}. {set_home}"
        )
    return answers


def joins_cluster(environment: Mapping[str, str], session: str | None = None) -> bool:
    """Whether Ray joins a cluster that runs; see `unwritable` for the arguments."""
    sessions = Path(session or _sessions(environment))
    is_named = environment.get("RAY_ADDRESS", "local") != "local"
    return is_named or os.access(sessions / CLUSTER, os.R_OK)


def _sessions(environment: Mapping[str, str]) -> str:
    around = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"
    return f"{around}/ray"


def _writes_token(environment: Mapping[str, str], home: Path | None) -> bool:
    """Whether Ray makes a token: it does where tokens are on, and nobody has given one."""
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        return False
    if environment.get("RAY_AUTH_TOKEN") or environment.get("RAY_AUTH_TOKEN_PATH"):
        return False
    return home is None or not os.path.isfile(home / ".ray" / "auth_token")


def _home(environment: Mapping[str, str]) -> Path | None:
    """Return the user's home; None for a user id without a name, and without HOME."""
    if environment.get("HOME"):
        return Path(environment["HOME"])
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def _existing(folder: Path) -> Path:
    """Return the folder, or the first of its parents that exists."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder


def _can_make_in(folder: Path) -> bool:
    """Whether this user can make files in a folder, which may have to be made first."""
    existing = _existing(folder)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _reason(folder: Path) -> str:
    existing = _existing(folder)
    if not existing.is_dir():
        return f"{existing} is no folder"
    owner = existing.stat().st_uid
    if owner == os.getuid():
        return f"{existing} is read-only"
    return f"{existing} belongs to user {owner}, and you are user {os.getuid()}"


def main() -> None:
    overrides = sys.argv[1:]
    if any(override.lstrip("+").startswith(PREFIX) for override in overrides):
        return  # the check knows the whole configuration
    answers = unwritable(os.environ)
    for answer in answers.values():
        print(f"run.sh: {answer}", file=sys.stderr)
    if answers:
        sys.exit(DENIED)


if __name__ == "__main__":
    main()
