"""The command `verl-gdpo`."""

import argparse
import ast
import functools
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from repository import REPO

import verl_gdpo
from verl_gdpo.__main__ import COMMANDS, MODULES, main
from verl_gdpo.terminal import note


def test_every_command_is_a_module_of_its_name():
    for name in COMMANDS.keys() - {"recipes"}:  # which prints a folder
        assert callable(importlib.import_module(f"verl_gdpo.tools.{MODULES.get(name, name)}").main)


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


# --- help texts ---------------------------------------------------------------------------------


class Helped(Exception):
    """The parser whose help was asked for."""

    def __init__(self, parser):
        super().__init__()
        self.parser = parser


def parser_of(command, monkeypatch):
    """The parser of a subcommand, caught when its help is asked for."""

    def caught(parser, file=None):
        raise Helped(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "print_help", caught)
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", command, "--help"])
    with pytest.raises(Helped) as helped:
        main()
    return helped.value.parser


def with_subparsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from with_subparsers(choice)


@functools.cache  # of some thousand texts
def top_of_the_repository():
    """The files and folders beside the package."""
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout
    return {line.partition("/")[0] for line in tracked.splitlines()} - {"verl_gdpo"}


def paths_of_the_repository(text):
    """What a text names that a checkout has, and an installed package has not."""
    top = top_of_the_repository()
    files = {name for name in top if "." in name}
    for word in re.findall(r"[\w.~/-]+", text):
        first = word.removeprefix("./").partition("/")[0]
        is_page = word.rstrip(".").endswith(".md")
        is_there = word.rstrip(".:") in files or ("/" in word and first in top)
        if is_there or is_page or "setup_env" in word:
            yield word


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_that_holds_for_an_installed_package(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # so that no path is broken over two lines
    parser = parser_of(command, monkeypatch)
    assert parser.prog == f"verl-gdpo {command}" and (parser.description or "").strip()
    for each in with_subparsers(parser):
        for action in each._actions:
            if not isinstance(action, argparse._SubParsersAction):
                assert (action.help or "").strip(), f"{each.prog}: {action.dest} has no help"
        assert list(paths_of_the_repository(each.format_help())) == [], each.prog


def test_no_message_names_what_an_installed_package_lacks():
    """`run.sh` is named by what it alone starts."""
    by_run_sh = {*re.findall(r"\$root/(verl_gdpo/\S+\.py)", (REPO / "run.sh").read_text())}
    by_run_sh.add("verl_gdpo/tools/run/resume.py")
    faults = []
    for file in sorted((REPO / "verl_gdpo").rglob("*.py")):
        name = file.relative_to(REPO).as_posix()
        allowed = {"run.sh"} if name in by_run_sh else set()
        for text in messages_of(ast.parse(file.read_text())):
            paths = {path.rstrip(".:") for path in paths_of_the_repository(text)}
            faults += [f"{name}: {path}" for path in sorted(paths - allowed)]
    assert faults == []


def messages_of(tree):
    """All texts of a module but docstrings, those of attributes too."""
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            docstrings.add(node.value)
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and node not in docstrings:
            yield node.value


def test_paths_of_the_repository_are_found():
    assert list(paths_of_the_repository("as docs/check.md says, ./run.sh in runs/ with a.py")) == [
        "docs/check.md",
        "./run.sh",
    ]


def test_every_command_shows_its_help_and_names_itself(monkeypatch, capsys):
    for command in COMMANDS:
        monkeypatch.setattr(sys, "argv", ["verl-gdpo", command, "--help"])
        with pytest.raises(SystemExit) as stopped:
            main()
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: verl-gdpo {command}")


def test_recipes_take_no_argument(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", "recipes", "tool_rl"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "unrecognized arguments: tool_rl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["data", "gsm8k", "--from", "none.json", "--out", "{folder}/out"], 1),
        (["summary", "{folder}/none"], 1),
        (["replay", "{folder}/none"], 1),
        (["report", "{folder}/none"], 1),
        (["evaluate", "{folder}/none", "--bench", "gsm8k"], 1),
        (["run", "--resume", "--", "true"], 2),
    ],
)
def test_messages_begin_with_the_command(arguments, code, monkeypatch, capsys, tmp_path):
    words = [word.replace("{folder}", str(tmp_path)) for word in arguments]
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", *words])
    assert main() == code
    for line in capsys.readouterr().err.splitlines():
        assert line.startswith((f"verl-gdpo {arguments[0]}: ", "  ")), line


def test_a_note_of_a_part_has_the_name_of_the_command(monkeypatch, capsys, tmp_path):
    """A line that cannot be read is said by what reads it, in the name of what was asked."""
    (tmp_path / "metrics").mkdir()
    lines = '{"step": 1, "data": {"a": 1.0}}\nno\n'
    (tmp_path / "metrics" / "1.jsonl").write_text(lines)
    monkeypatch.setattr(sys, "argv", ["verl-gdpo", "summary", str(tmp_path)])
    assert main() == 0
    assert capsys.readouterr().err.startswith("verl-gdpo summary: WARNING: 1 lines of ")
    note("by itself")
    assert capsys.readouterr().err == "by itself\n"
