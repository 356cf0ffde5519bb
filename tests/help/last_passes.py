"""Prints how old the last passes of the nox sessions are, or notes one: arguments NAME COMMIT.

noxfile.py notes a pass only if it ran the whole session on a commit, so nobody writes the file by
hand. `tests/run.sh` prints the ages.
"""

import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
FILE = "tests/slow/last_passes.json"


def sessions(repo: Path) -> list[str]:
    """Return the names of the sessions whose passes are noted."""
    return re.findall(r"^@recorded\ndef (\w+)", (repo / "noxfile.py").read_text(), re.M)


def note(repo: Path, name: str, commit: str) -> None:
    passes = json.loads((repo / FILE).read_text())
    passes[name] = {"commit": commit, "date": str(datetime.date.today())}
    (repo / FILE).write_text(json.dumps(passes, indent=2, sort_keys=True) + "\n")


def ages(repo: Path, today: datetime.date) -> list[str]:
    """Return a line for each session."""
    passes = json.loads((repo / FILE).read_text())
    lines = []
    for name in sessions(repo):
        if name not in passes:
            lines.append(f"{name:<12}never noted")
            continue
        commit, date = passes[name]["commit"], passes[name]["date"]
        days = (today - datetime.date.fromisoformat(date)).days
        command = ["git", "rev-list", "--count", f"{commit}..HEAD"]
        counted = subprocess.run(command, cwd=repo, capture_output=True, text=True)
        commits = counted.stdout.strip() if counted.returncode == 0 else "an unknown number of"
        lines.append(f"{name:<12}{days} days and {commits} commits ago, {date} at {commit[:10]}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) == 3:
        note(REPO, *sys.argv[1:])
    else:
        print("Last pass of each nox session (CONTRIBUTING.md says which change needs which):")
        print("\n".join(ages(REPO, datetime.date.today())))
