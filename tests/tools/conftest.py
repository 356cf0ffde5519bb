"""`verl-gdpo check` as its tests call it."""

import importlib

import pytest
from quick_composition import compose_quickly
from rows_for_check import COMMAND, arguments_of, write_check_data

from verl_gdpo.tools import compose
from verl_gdpo.tools.check import main

UNTESTED = "verl-gdpo: gdpo was not tested with this verl"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    # what verl logs while it is imported must not be taken for a message
    importlib.import_module("verl.trainer.ppo.v1")
    folder = tmp_path_factory.mktemp("data")
    write_check_data(folder)
    return folder


@pytest.fixture
def checks(monkeypatch, capfd):
    """(exit code, output, messages) of `verl-gdpo check` with these arguments."""
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setattr(compose, "compose_config", compose_quickly)

    def run(*arguments):
        code = main(arguments)
        printed = capfd.readouterr()
        lines = printed.err.splitlines(keepends=True)
        # `nox -s verl` runs these tests on another verl.
        problems = "".join(line for line in lines if not line.startswith(UNTESTED))
        assert (code == 0) == (problems == "") == ("check: no problem found" in printed.out)
        assert "Traceback" not in problems
        return code, printed.out, problems

    return run


@pytest.fixture
def plain(data, checks, monkeypatch, tmp_path):
    """The same of the plain command, in a folder without anything."""
    monkeypatch.chdir(tmp_path)

    def run(*added):
        return checks("--rows", "1", *arguments_of(COMMAND, data), *added)

    return run
