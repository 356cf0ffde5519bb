"""The command `verl-gdpo`."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPO

import verl_gdpo
from verl_gdpo.__main__ import COMMANDS, main


def test_every_command_is_a_module_of_its_name():
    for name in COMMANDS.keys() - {"recipes"}:  # which prints a folder
        assert callable(importlib.import_module(f"verl_gdpo.tools.{name}").main)


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--help"], 0), (["chek"], 2)])
def test_usage(monkeypatch, capsys, arguments, code):
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", *arguments])
    assert main() == code
    printed = capsys.readouterr()
    text = printed.err if code else printed.out
    assert all(name in text for name in COMMANDS)
    assert ("unknown command 'chek'" in text) == bool(code)


def test_a_command_finds_the_modules_of_the_current_folder(tmp_path):
    """As `python -m` does: a reward function may import its neighbours."""
    (tmp_path / "neighbour.py").write_text("NUMBER = 7")
    code = (
        "import sys; from verl_gdpo.__main__ import main\n"
        "sys.path[0], sys.argv = '/nowhere', ['verl-gdpo', 'summary', '/nowhere']\n"
        "main(); import neighbour; print(neighbour.NUMBER)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.stdout == b"7\n", done.stderr


def test_the_exit_code_is_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", "summary", "nowhere"])
    assert main() == 1
    assert "nowhere: no such file or folder" in capsys.readouterr().err


def test_version_and_recipes(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for arguments in (["--version"], ["recipes"]):
        monkeypatch.setattr(sys, "argv", ["verl-gdpo", *arguments])
        assert main() == 0
    version, folder = capsys.readouterr().out.splitlines()
    assert version == verl_gdpo.__version__
    assert (Path(folder) / "train.yaml").read_text() == (REPO / "recipes/train.yaml").read_text()


def test_the_command_in_a_checkout_is_the_subcommand(monkeypatch, capsys):
    done = subprocess.run(
        [sys.executable, "-m", "data_prep", "--help"], cwd=REPO, capture_output=True, text=True
    )
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", "data", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert done.stdout == capsys.readouterr().out
    assert "tool_rl" in done.stdout
