"""Where the tests run: the folders of `tests/run.sh`, and what is skipped."""

import os
import shutil
import subprocess
import tempfile

import of_machine
import pytest
from executable import program
from repository import REPO

PROGRAM = """#!/bin/sh
[ "$2" = pytest ] || exit 0
printf '%s\\n' "$TMPDIR" "$@" >../said
mkdir "$6"
"""


@pytest.fixture
def tests_run(tmp_path):
    """(environment) -> the arguments of pytest and TMPDIR, of `tests/run.sh` with stand-ins."""
    checkout = tmp_path / "checkout"
    (checkout / "tests").mkdir(parents=True)
    shutil.copy(REPO / "tests" / "run.sh", checkout / "tests")
    programs = tmp_path / "venv" / "bin"
    for name in ("ruff", "lint-imports", "mypy", "bwrap", "chromium", "python"):
        program(programs / name, PROGRAM)
    program(checkout / "setup_env.sh", f"#!/bin/sh\necho {programs.parent}\n")

    def run(**environment):
        path = f"{programs}:{os.environ['PATH']}"
        command = ["bash", "tests/run.sh", "-k", "some"]
        env = {**os.environ, "PATH": path, **environment}
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        temporary, *arguments = (tmp_path / "said").read_text().splitlines()
        assert arguments[:5] == ["-m", "pytest", "-n", "2", "--basetemp"]
        assert arguments[-2:] == ["-k", "some"]
        return temporary, arguments[5], done.stdout

    return run


@pytest.mark.parametrize("length", [20, 37, 120])
def test_the_base_folder_has_the_length_that_is_asked_for(tests_run, length):
    temporary, base, said = tests_run(TESTS_BASE_LENGTH=str(length), TMPDIR="/tmp")
    assert len(base) == length and f"TESTS_BASE_LENGTH={length} " in said
    # Ray's sockets are in the short one of the two, and nothing is left of both
    assert len(temporary) == len("/tmp/vg-123456") and base.startswith(f"{temporary}/")
    assert not os.path.exists(temporary)


def test_a_folder_for_temporary_files(tests_run, tmp_path):
    """It is used, if it is short enough for Ray."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        temporary, base, _ = tests_run(TESTS_BASE_LENGTH="20", TMPDIR=folder)
        assert temporary.startswith(f"{folder}/vg-") and len(base) == len(temporary) + 2
        assert not os.listdir(folder)
    far = tmp_path / ("t" * 28)
    far.mkdir()
    assert tests_run(TMPDIR=str(far))[0].startswith("/tmp/vg-")


def test_the_length_is_drawn(tests_run):
    lengths = {len(tests_run(TESTS_BASE_LENGTH="", TMPDIR="/tmp")[1]) for _ in range(8)}
    assert len(lengths) > 2 and min(lengths) >= 20 and max(lengths) <= 120


@pytest.mark.parametrize(("ci", "outcome"), [("false", pytest.skip), ("true", pytest.fail)])
def test_what_is_not_here_is_said_in_a_line_and_fails_in_ci(monkeypatch, ci, outcome):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome.Exception, match=r"apt-get install bubblewrap"):
        of_machine.confinement_of("bubblewrap")
    with pytest.raises(outcome.Exception, match=r"apt-get install chromium"):
        of_machine.browser()


def test_bubblewrap_without_rights_is_not_here_either(monkeypatch, tmp_path):
    program(tmp_path / "bwrap", "#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "false")
    with pytest.raises(pytest.skip.Exception, match=r"^bubblewrap .*kernel.unprivileged_userns"):
        of_machine.confinement_of("bubblewrap")
