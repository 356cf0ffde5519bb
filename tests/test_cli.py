"""The command `verl-gdpo`."""

import importlib
import sys

import pytest

from verl_gdpo.__main__ import COMMANDS, main


def test_every_command_is_a_module_of_its_name():
    for name in COMMANDS:
        assert callable(importlib.import_module(f"verl_gdpo.tools.{name}").main)


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["--help"], 0), (["chek"], 2)])
def test_usage(monkeypatch, capsys, arguments, code):
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", *arguments])
    assert main() == code
    printed = capsys.readouterr()
    text = printed.err if code else printed.out
    assert all(name in text for name in COMMANDS)
    assert ("unknown command 'chek'" in text) == bool(code)


def test_the_exit_code_is_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", "summary", "/nowhere"])
    assert main() == 2
    assert "usage: verl-gdpo summary" in capsys.readouterr().err
