"""The files of the repository that git tracks; tests depend on no other files in its folder."""

import subprocess
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def tracked_files():
    """Relative to the repository; without those that have been deleted."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True)
    names = [name for name in done.stdout.decode().split("\0") if name]
    return [Path(name) for name in names if (REPO / name).exists()]
