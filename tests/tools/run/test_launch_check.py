"""A check runs beside the driver, and its problems end the run."""

import subprocess
import sys

import pytest
from launched import children_of, driver
from processes import completed

from verl_gdpo.tools import CHECK_FAULT
from verl_gdpo.tools.run.held_folder import HeldFolder
from verl_gdpo.tools.run.launch import _check_of, _wait, launch, main
from verl_gdpo.tools.run.progress import Progress
from verl_gdpo.tools.run.stop_conditions import StopConditions

TRAINER = ["-m", "verl.trainer.main_ppo", "a=1"]
CHECKED = "import sys, time; time.sleep({seconds}); print({text!r}, flush=True); sys.exit({code})"


def checked(folder, body, code, seconds=0.3):
    """How a launch ends whose check ends with this exit code."""
    check = [sys.executable, "-c", CHECKED.format(seconds=seconds, text="looked", code=code)]
    return launch(driver(folder, body), folder, check=check, quiet=True)


@pytest.mark.parametrize(
    ("body", "seconds", "code", "expected"),
    [
        ("time.sleep(1.5); sys.exit(0)", 0.3, 0, (0, "finished")),
        ("time.sleep(600)", 0.3, 1, (1, "refused")),
        ("sys.exit(3)", 1, 1, (1, "refused")),  # it explains why the driver failed
        ("sys.exit(3)", 0.3, 0, (3, "failed")),
    ],
)
def test_how_a_run_ends_that_is_checked(tmp_path, capfd, body, seconds, code, expected):
    end = checked(tmp_path, body, code, seconds)
    assert (end.exit_code, end.reason) == expected
    assert not children_of(tmp_path)
    assert capfd.readouterr().out == "looked\n"
    assert (tmp_path / "train.log").read_text() == ""


def test_a_time_limit_ends_the_wait_for_the_check_of_a_run_that_has_failed(tmp_path):
    end = launch(["false"], tmp_path, check=["sleep", "20"], time_limit=3, quiet=True)
    assert (end.exit_code, end.reason) == (1, "failed")


@pytest.mark.parametrize(
    ("deadline", "parent"), [(0.0, None), (float("inf"), -1)], ids=["time limit", "parent is gone"]
)
@pytest.mark.parametrize(
    ("command", "expected"), [("false", (1, "failed")), ("true", (0, "finished"))]
)
def test_a_command_that_has_ended_keeps_its_own_end(tmp_path, deadline, parent, command, expected):
    """Whatever happens while its check still runs."""
    ended = subprocess.Popen([command])
    ended.wait()
    checking = subprocess.Popen(["sleep", "20"])
    try:
        with HeldFolder(tmp_path) as held:
            ends = StopConditions(held, deadline, parent, tmp_path / "1.jsonl", checking=checking)
            end = _wait(ended, Progress(held, quiet=True), ends)
    finally:
        checking.kill()
        checking.wait()
    assert (end.exit_code, end.reason) == expected


def launched(monkeypatch, run, check):
    """The exit code of a launcher whose check is this program."""
    program = [sys.executable, "-c", check]
    monkeypatch.setattr("verl_gdpo.tools.run.launch._check_of", lambda command, options: program)
    return main(["--check", "--run-dir", str(run), "sleep", "600"])


def test_a_check_that_dies_says_so_and_leaves_the_log(tmp_path, monkeypatch, capfd):
    """It calls the user's reward function, which can end the interpreter."""
    run = tmp_path / "run"
    assert launched(monkeypatch, run, "import os; os.kill(os.getpid(), 9)") == 1
    assert "the check itself ended, with exit code 137" in capfd.readouterr().err
    assert (run / "train.log").exists()


def test_a_refused_run_leaves_nothing(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--config-dir", "/none"]
    done = completed("-m", "verl_gdpo", "run", "--check", "--run-dir", run, "--", *command)
    assert done.returncode == 1
    assert "check: " in done.stderr and "whole log" not in done.stderr
    assert not run.exists()


def test_a_refused_run_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").touch()
    assert launched(monkeypatch, tmp_path, "raise SystemExit(1)") == 1
    assert (tmp_path / "notes.txt").exists()


def test_the_check_gets_its_options(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "verl_gdpo.tools.run.launch._check_of", lambda *given: asked.append(given) or []
    )
    options = ["--check", "--check-option=--seconds=300", "--check-option=--allow-flat"]
    command = [sys.executable, "-c", "", "a=1"]
    assert main([*options, "--run-dir", str(tmp_path), *command]) == 0
    assert asked == [(command, ["--seconds=300", "--allow-flat"])]
    monkeypatch.undo()
    told = _check_of([sys.executable, *TRAINER], ["--allow-flat"])
    assert told == [sys.executable, "-m", "verl_gdpo", "check", "--brief", "--allow-flat", "a=1"]


def program(path, body):
    """A program of the shell, such as a Python that is not ours."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_check_runs_in_the_python_of_the_command(tmp_path):
    python = program(tmp_path / "python3.11", f'exec {sys.executable} "$@"')
    for words in (
        [python],
        [python, "-u"],
        ["env", "A=1", python, "-u", "-X", "dev"],
        [python, "-m", "torch.distributed.run", "--nproc_per_node", "1"],
    ):
        assert _check_of([*words, *TRAINER], [])[:3] == [python, "-m", "verl_gdpo"]
    # torchrun does not say which Python it starts: it is taken for ours.
    for option in (["--nproc_per_node=1"], ["--nproc_per_node", "1"]):
        assert _check_of(["torchrun", *option, *TRAINER], [])[0] == sys.executable


def test_a_python_that_cannot_check_is_said_before_anything_starts(tmp_path, capfd):
    run = tmp_path / "run"
    bare = program(tmp_path / "python3", "exit 1")
    for python in (bare, str(tmp_path / "python")):
        words = ["--check", "--run-dir", str(run), python, *TRAINER]
        assert main(words) == 2
        message = capfd.readouterr().err
        assert f"verl-gdpo run: --check: {python} has no verl-gdpo" in message
        assert not run.exists()


def test_a_check_that_cannot_start_ends_no_run(tmp_path, capfd):
    """As where its Python goes away while the driver starts."""
    command = driver(tmp_path, "time.sleep(1.5); sys.exit(0)")
    end = launch(command, tmp_path, check=["/nowhere"], quiet=True)
    assert (end.exit_code, end.reason) == (0, "finished")
    messages = capfd.readouterr().err
    assert "FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'" in messages
    assert messages.count("the check did not run to its end; the run goes on") == 1
    assert "Traceback" not in messages


def test_a_fault_of_the_check_itself_ends_no_run(tmp_path, capfd):
    check = [sys.executable, "-c", f"raise SystemExit({CHECK_FAULT})"]
    command = driver(tmp_path, "time.sleep(1.5); sys.exit(0)")
    end = launch(command, tmp_path, check=check, quiet=True)
    assert (end.exit_code, end.reason) == (0, "finished")
    assert "the check did not run to its end; the run goes on" in capfd.readouterr().err
