"""Which nox sessions are due, and what they cover."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import last_passes
import pytest
import yaml
from last_passes import UnknownError
from repository import REPO

NOXFILE = """
@nox.session
@recorded("run/", "run.sh")
def faults(session): ...


@nox.session(default=False)
@recorded(
    "advantage/",
)
def trl(session): ...
"""


def git(folder, *command):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *command], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


def commit(repo, file, text):
    (repo / file).parent.mkdir(exist_ok=True)
    (repo / file).write_text(text)
    git(repo, "add", ".")
    git(repo, "commit", "-qm", file)


@pytest.fixture
def repo(tmp_path):
    made = tmp_path / "repo"
    (made / "tests" / "slow").mkdir(parents=True)
    (made / last_passes.FILE).write_text("{}")
    git(made, "init", "-q")
    commit(made, "run/launch.py", "1")
    commit(made, "noxfile.py", NOXFILE)
    return made


def noted(repo, name="faults"):
    last_passes.note(repo, name, git(repo, "rev-parse", "HEAD"), 90, {"passed": 3, "skipped": 1})
    return last_passes.read(repo)[name]


def test_a_note_has_commit_date_seconds_counts_and_what_is_covered(repo):
    found = noted(repo)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.pop("date"))
    assert found == {
        "commit": git(repo, "rev-parse", "HEAD"),
        "seconds": 90,
        **{"passed": 3, "failed": 0, "skipped": 1},
        "covers": ["run/", "run.sh"],
    }


def test_the_note_of_a_session_that_is_gone_goes_with_the_next_one(repo):
    (repo / last_passes.FILE).write_text('{"workspace": {}}')
    noted(repo)
    assert {*last_passes.read(repo)} == {"faults"}


def due(repo):
    return last_passes.state(repo)[0]


def overdue(repo):
    """The sessions alone."""
    return [line.split()[2] for line in last_passes.state(repo)[1]]


def test_a_session_is_due_once_what_it_covers_has_changed(repo):
    missing = [f"nox -s {name:<12}no pass is noted" for name in ("faults", "trl")]
    assert last_passes.state(repo) == (missing, missing)
    last = noted(repo)
    noted(repo, "trl")
    assert last_passes.state(repo) == ([], [])
    commit(repo, "advantages.py", "no path that a session covers")
    assert due(repo) == []
    commit(repo, "run/launch.py", "2")
    commit(repo, "run.sh", "1")
    at = f"{last['date']} at {last['commit'][:10]}, 90 s"
    said = f"run.sh and 1 more changed since its pass ({at})"
    assert due(repo) == [f"nox -s faults      {said}"]
    (repo / "advantage").mkdir()
    (repo / "advantage" / "new.py").touch()  # what is not committed counts too
    assert "advantage/new.py changed" in due(repo)[1]


def test_a_pass_of_a_commit_that_is_not_here(repo):
    for name in ("faults", "trl"):
        last_passes.note(repo, name, "0" * 40, 90, {})
    assert "commit 0000000000 of its pass is not here" in due(repo)[0]
    assert overdue(repo) == ["faults", "trl"]


def test_a_pass_is_overdue_after_many_commits_of_what_it_covers(repo, monkeypatch):
    monkeypatch.setattr(last_passes, "MOST_COMMITS", 2)
    noted(repo)
    assert overdue(repo) == ["trl"]  # missing
    noted(repo, "trl")
    for text in "23":
        commit(repo, "run/launch.py", text)
        commit(repo, "other.py", text)
    assert overdue(repo) == []
    commit(repo, "run/launch.py", "4")
    assert overdue(repo) == ["faults"]
    assert "3 commits have touched what it covers" in last_passes.state(repo)[1][0]


def test_a_folder_covers_what_is_in_it_and_a_file_itself():
    covered = ["run/", "run.sh"]
    found = [last_passes.is_under(file, covered) for file in ("run/a/b", "run.sh", "run.sh~", "ru")]
    assert found == [True, True, False, False]


def test_nobody_knows_without_all_commits_or_git(repo, tmp_path, monkeypatch):
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", str(shallow))
    with pytest.raises(UnknownError, match="shallow clone"):
        last_passes.state(shallow)
    archive = tmp_path / "archive"
    shutil.copytree(repo, archive, ignore=shutil.ignore_patterns(".git"))
    with pytest.raises(UnknownError, match="not a git repository"):
        last_passes.state(archive)
    inside = repo / "archive"  # in a repository of somebody else
    shutil.copytree(archive, inside)
    with pytest.raises(UnknownError, match="is no repository"):
        last_passes.state(inside)
    monkeypatch.setenv("PATH", str(repo))
    with pytest.raises(UnknownError, match="git is not installed"):
        last_passes.state(repo)


@pytest.fixture(scope="module")
def noxfile():
    return importlib.import_module("noxfile")  # a second copy would register its sessions again


@pytest.fixture
def recorded(noxfile, repo, monkeypatch):
    """Run a session, as noxfile.py would in `repo`, and return what it noted."""
    monkeypatch.setattr(noxfile, "ROOT", repo)
    (repo / "tests" / "help").mkdir()
    shutil.copy(REPO / noxfile.LAST_PASSES, repo / "tests" / "help")
    git(repo, "add", ".")
    git(repo, "commit", "-qm", "help")

    def run(what=lambda session: None, *posargs):
        def faults(session):
            what(session)
            return Counter(passed=2)

        session = SimpleNamespace(posargs=posargs, log=lambda message: None)
        noxfile.recorded("run/")(faults)(session)
        return last_passes.read(repo).get("faults")

    return run


def test_a_pass_is_noted_and_noted_again(repo, recorded):
    found = recorded()
    assert found["commit"] == git(repo, "rev-parse", "HEAD")
    assert found["passed"] == 2
    git(repo, "commit", "-qm", "next", "--allow-empty")  # and the file of passes has changed
    assert recorded()["commit"] == git(repo, "rev-parse", "HEAD")


def test_no_pass_is_noted_of_a_part_or_of_changed_files(repo, recorded):
    assert recorded(lambda session: None, "-k", "one") is None
    with pytest.raises(ZeroDivisionError):
        recorded(lambda session: 1 / 0)
    assert recorded(lambda session: (repo / "new.py").touch()) is None  # in mid-session
    assert recorded() is None  # new.py is no part of the commit
    (repo / "new.py").unlink()
    (repo / "noxfile.py").write_text((repo / "noxfile.py").read_text() + "\n")
    assert recorded() is None


def test_the_counts_of_a_session_are_those_of_pytest(noxfile, tmp_path):
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('n', range(3))\n"
        "def test_n(n):\n    pass\n"
        "@pytest.mark.skip\n"
        "def test_left_out():\n    pass\n"
    )

    def run(*command, env, external):
        subprocess.run(command, env={**os.environ, **env}, cwd=tmp_path, check=True)

    session = SimpleNamespace(run=run)
    found = noxfile.tested(session, "test_some.py", python=sys.executable)
    assert found == Counter(passed=3, failed=0, skipped=1)


# --- what the sessions of this repository cover ---------------------------------------------------


@pytest.fixture(scope="module")
def tracked():
    """The files of the repository."""
    try:
        last_passes.check_history(REPO)
        return last_passes.git(REPO, "ls-files").splitlines()
    except UnknownError as error:
        pytest.skip(str(error))


def test_all_sessions_together_cover_the_package(tracked):
    covered = [path for paths in last_passes.covered(REPO).values() for path in paths]
    promised = ["verl_gdpo/", "recipes/", "run.sh", "setup_env.sh", "data_prep/", "examples/"]
    # no session loses a path of its last pass that no other session has
    promised += [
        path for last in last_passes.read(REPO).values() for path in last.get("covers", ())
    ]
    for path in promised:
        files = [file for file in tracked if last_passes.is_under(file, [path])]
        assert [file for file in files if not last_passes.is_under(file, covered)] == [], path


def test_each_path_that_a_session_covers_is_there(tracked):
    for name, paths in last_passes.covered(REPO).items():
        assert len(paths) == len({*paths}), name
        for path in paths:
            assert any(last_passes.is_under(file, [path]) for file in tracked), (name, path)


def test_no_pass_is_missing_or_old(tracked):
    assert overdue(REPO) == []


def test_all_sessions_of_tests_are_noted():
    defined = {
        node.name
        for node in ast.parse((REPO / "noxfile.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(one) for one in node.decorator_list)
    }
    assert defined - {*last_passes.covered(REPO)} == {"pins"}


def test_the_weekly_workflow_runs_every_session():
    weekly = yaml.safe_load((REPO / ".github/workflows/weekly.yml").read_text())
    matrix = weekly["jobs"]["session"]["strategy"]["matrix"]
    assert sorted(matrix["session"]) == sorted(last_passes.covered(REPO))


def test_actions_are_pinned_by_commit():
    for file in (REPO / ".github" / "workflows").iterdir():
        used = re.findall(r"uses: (.*)", file.read_text())
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", one) for one in used)
