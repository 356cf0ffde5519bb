"""What `tests/run.sh` says about the nox sessions."""

import datetime
import importlib.util
import json
import re
import shutil
import subprocess
from types import SimpleNamespace

import last_passes
import pytest
import yaml
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


@pytest.fixture(scope="module")
def noxfile():
    spec = importlib.util.spec_from_file_location("noxfile", REPO / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded(noxfile, repo, monkeypatch):
    """Run a session, as noxfile.py would in `repo`, and return the commit that it noted."""
    monkeypatch.setattr(noxfile, "ROOT", repo)
    (repo / "tests" / "help").mkdir()
    shutil.copy(REPO / noxfile.LAST_PASSES, repo / "tests" / "help")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "help")

    def run(what=lambda session: None, *posargs):
        def faults(session):
            what(session)

        session = SimpleNamespace(posargs=posargs, log=lambda message: None)
        noxfile.recorded(faults)(session)
        return json.loads((repo / last_passes.FILE).read_text()).get("faults", {}).get("commit")

    return run


def test_a_pass_is_noted_and_noted_again(repo, recorded):
    assert recorded() == git(repo, "rev-parse", "HEAD")
    git(repo, "commit", "-qm", "next", "--allow-empty")  # and the file of passes has changed
    assert recorded() == git(repo, "rev-parse", "HEAD")


def test_no_pass_is_noted_of_a_part_or_of_changed_files(repo, recorded):
    assert recorded(lambda session: None, "-k", "one") is None
    with pytest.raises(ValueError, match="failed"):
        recorded(failing)
    assert recorded(lambda session: (repo / "new.py").touch()) is None  # in mid-session
    assert recorded() is None  # new.py is no part of the commit
    (repo / "new.py").unlink()
    (repo / "noxfile.py").write_text((repo / "noxfile.py").read_text() + "\n")
    assert recorded() is None


def failing(session):
    raise ValueError("failed")


def test_all_sessions_of_tests_are_noted_and_are_in_contributing():
    table = re.findall(r"^\| `nox -s (\w+)` \|", (REPO / "CONTRIBUTING.md").read_text(), re.M)
    noted = last_passes.sessions(REPO)
    assert {*noted} == {*table}
    defined = re.findall(r"^def (\w+)\(session", (REPO / "noxfile.py").read_text(), re.M)
    assert {*defined} - {*noted} == {"pins", "install", "compiled"}
    assert {*json.loads((REPO / last_passes.FILE).read_text())} <= {*noted}


def test_the_weekly_workflow_runs_every_session():
    weekly = yaml.safe_load((REPO / ".github/workflows/weekly.yml").read_text())
    matrix = weekly["jobs"]["session"]["strategy"]["matrix"]
    assert sorted(matrix["session"]) == sorted(last_passes.sessions(REPO))


def test_actions_are_pinned_by_commit():
    for file in (REPO / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (.*)", file.read_text())
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one) for one in used)
