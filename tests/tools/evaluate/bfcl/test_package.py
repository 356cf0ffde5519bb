"""The environment of the package is made once, and what cannot be made or asked is one line."""

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_gdpo.tools.evaluate.bfcl import package


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """The commands that were run; a test may set the `code` of each."""
    ran = SimpleNamespace(list=[], code=0)

    def run(command, **_):
        ran.list.append(" ".join(map(str, command)))
        if "venv" in command:
            Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, ran.code)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(package.subprocess, "run", run)
    return ran


def test_the_environment_is_made_once(commands, tmp_path, capsys):
    folder = package.environment()
    assert folder.parent == tmp_path / "verl-gdpo"
    venv, pip = commands.list
    assert venv.endswith(f"-m venv {folder}")
    assert "--require-hashes" in pip and pip.endswith("bfcl/requirements.txt")
    assert package.environment() == folder
    assert len(commands.list) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_environment_that_cannot_be_made_is_made_again(commands):
    commands.code = 1
    with pytest.raises(ValueError, match=r"-m venv .* failed, .*PIP_INDEX_URL"):
        package.environment()
    commands.code = 0
    package.environment()
    assert len(commands.list) == 3


def test_the_pins_have_the_questions_of_version_3():
    assert "\nbfcl-eval==2025.6.8 " in package.PINS.read_text()


def test_a_process_that_has_ended_stops_the_evaluation(monkeypatch):
    ended = SimpleNamespace(stdin=io.StringIO(), stdout=io.StringIO(), wait=lambda: -9)
    monkeypatch.setattr(package, "_process", lambda _: ended)
    with pytest.raises(OSError, match="has ended with -9"):
        package.ask("simple", "is_right", "simple_0", [])


def test_what_is_nested_too_deep_for_json_is_not_asked():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert package.ask("simple", "is_right", "simple_0", [{"f": deep}]) == []


@pytest.mark.parametrize(("first", "reason"), [('"no lock"\n', "no lock"), ("", "see above")])
def test_a_process_that_cannot_lock_is_not_used(monkeypatch, tmp_path, first, reason):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(f"#!/bin/sh\nprintf '%s' '{first}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(package, "environment", lambda: tmp_path)
    with pytest.raises(OSError, match=f"cannot be asked: .*{reason}"):
        package._process.__wrapped__(False)
