"""The net under the table: what it knows of each function, and of what verl's main module calls.

`tests/test_past_ours.py` has runs in which verl goes past one.
"""

import re
import sys
import types

import pytest
from repository import REPO

from verl_gdpo.hooks import extend, net
from verl_gdpo.plugin import EXTENSIONS


def test_each_function_of_the_table_has_what_is_lost_without_it():
    for each in EXTENSIONS:
        assert bool(each.lost) == bool(each.replacement), each
        assert each.lost or not each.ends_run


@pytest.mark.parametrize(("mark", "ends_run"), [("ends the run", True), ("lost", False)])
def test_the_lists_in_the_docs(mark, ends_run):
    text = (REPO / "docs" / "how_it_works.md").read_text()
    (shown,) = re.findall(rf"<!-- without: {mark} -->\n(.*?)<!-- end -->", text, re.S)
    rows = ["| function | without it |", "|---|---|"]
    for each in EXTENSIONS:
        if each.replacement and each.ends_run == ends_run:
            rows.append(f"| `{each.path}` | {each.lost} |")
    assert shown.strip().splitlines() == rows


# --- what verl's main module calls ---------------------------------------------------------------


@pytest.fixture
def main(monkeypatch):
    """verl's main module, as `python -m` runs it."""
    module = types.ModuleType("__main__")
    module.__file__ = f"{sys.modules['verl'].__path__[0]}/trainer/main_ppo.py"
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setattr(net, "_told", set())
    for path in ("auto_set_device", "run_ppo"):
        row = net.row_of(path)

        def function():
            pass

        function.__module__ = "verl.utils.device"
        setattr(module, path, extend._standing_for(function, row))

    def start():
        auto_set_device()  # noqa: F821
        run_ppo()  # noqa: F821

    start.__module__ = "__main__"
    module.main = start
    return module


def warned(capsys):
    net.warn_of_idle_start()
    return re.findall(r"go past ours for (\S+): ", capsys.readouterr().err)


def test_a_main_module_that_calls_ours(main, capsys):
    assert warned(capsys) == []


def test_a_main_module_that_calls_another_function(main, capsys):
    def start():
        auto_set_device()  # noqa: F821

    start.__module__ = "__main__"
    main.main = start
    assert warned(capsys) == ["verl.trainer.main_ppo:run_ppo"]


def test_a_main_module_in_which_ours_is_missing(main, capsys):
    main.auto_set_device = main.auto_set_device.__wrapped__
    assert warned(capsys) == ["verl.utils.device:auto_set_device"]


def test_a_script_of_the_users_is_no_main_module_of_verls(capsys):
    assert net.verls_main() is None and warned(capsys) == []
