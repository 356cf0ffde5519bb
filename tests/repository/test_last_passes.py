"""What `tests/run.sh` says about the nox sessions."""

import datetime
import json
import re
import subprocess

import last_passes
import pytest
from repository import REPO


def git(folder, *command):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *command], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


@pytest.fixture
def repo(tmp_path):
    (tmp_path / "tests" / "slow").mkdir(parents=True)
    (tmp_path / last_passes.FILE).write_text("{}")
    sessions = "@nox.session\n@recorded\ndef faults(session): ...\n\n\n"
    (tmp_path / "noxfile.py").write_text(sessions + sessions.replace("faults", "trl"))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_age_of_a_pass_is_in_days_and_commits(repo):
    commit = git(repo, "rev-parse", "HEAD")
    last_passes.note(repo, "faults", commit)
    for message in ("second", "third"):
        git(repo, "commit", "-qm", message, "--allow-empty")
    date = json.loads((repo / last_passes.FILE).read_text())["faults"]["date"]
    later = datetime.date.fromisoformat(date) + datetime.timedelta(days=3)
    faults, trl = last_passes.ages(repo, later)
    assert faults == f"faults      3 days and 2 commits ago, {date} at {commit[:10]}"
    assert trl == "trl         never noted"


def test_a_pass_of_a_commit_that_is_not_here(repo):
    last_passes.note(repo, "trl", "0" * 40)
    assert (
        "0 days and an unknown number of commits ago"
        in last_passes.ages(repo, datetime.date.today())[1]
    )


def test_all_sessions_of_tests_are_noted_and_are_in_contributing():
    table = re.findall(r"^\| `nox -s (\w+)` \|", (REPO / "CONTRIBUTING.md").read_text(), re.M)
    noted = last_passes.sessions(REPO)
    assert {*noted} == {*table}
    defined = re.findall(r"^def (\w+)\(session", (REPO / "noxfile.py").read_text(), re.M)
    assert {*defined} - {*noted} == {"pins", "install", "compiled"}
    assert {*json.loads((REPO / last_passes.FILE).read_text())} <= {*noted}
