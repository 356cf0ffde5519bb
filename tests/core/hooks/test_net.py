"""The net under the table: verl goes past one function of ours, and a run says so, or ends.

The runs are those of `past_ours.py`; `tests/slow/net.py` has one for each function of the table.
"""

import re
import sys
import types

import pytest
from played_past_ours import WITHOUT_GDPO, played, trained

from verl_gdpo.hooks import extend, net
from verl_gdpo.plugin import EXTENSIONS

ROWS = {(each.module.rpartition(".")[2], each.path): each for each in EXTENSIONS}
GRPO = ["algorithm.adv_estimator=grpo"]


def case(kind, module, path, how="unused", overrides=()):
    row = ROWS[module, path]
    return {
        "kind": kind,
        "row": [row.module, row.path],
        "how": how,
        "overrides": [*overrides],
    }


CASES = [
    {"kind": "v1"},
    {"kind": "legacy"},
    # Its trainer and its rollouter have a `fit` of their own.
    {"kind": "fully_async"},
    # Another function than ours would train, and nothing would tell.
    case("v1", "trainer_base", "PPOTrainer._compute_advantage", overrides=GRPO),
    case("legacy", "ray_trainer", "compute_advantage", overrides=GRPO),
    case("v1", "trainer_base", "PPOTrainer._dump_generations"),
]


def name_of(run):
    return f"{run['row'][0]}:{run['row'][1]}"


def test_a_run_says_where_verl_goes_past_ours(tmp_path):
    for run in played(CASES, tmp_path):
        if not run.get("row"):
            assert run.get("raised") is None and run["warned"] == [], run
            assert run["trained"] == trained()
            continue
        module, path = run["row"]
        row = ROWS[module.rpartition(".")[2], path]
        assert any(name_of(run) in line and row.lost in line for line in run["warned"]), run
        if row.ends_run:
            assert name_of(run) in run["raised"] and row.lost in run["raised"], run
        else:
            assert run.get("raised") is None and run["trained"] == trained(), run


def test_a_run_without_gdpo_is_not_looked_at(tmp_path):
    """What a frame holds is not read: Python keeps what was read until the function returns."""
    with_gdpo = case("v1", "trainer_base", "PPOTrainer._compute_advantage", overrides=GRPO)
    cases = [{"kind": kind, "overrides": WITHOUT_GDPO} for kind in ("v1", "legacy")]
    *without, missing = played([*cases, with_gdpo], tmp_path)
    for run in without:
        assert run.get("raised") is None and run["warned"] == [], run
        assert len(run["trained"]) == 8 and run["metrics"] == []
        assert run["looked"] == 0
    assert missing["looked"] == 1


def test_each_function_of_the_table_has_what_is_lost_without_it():
    for each in EXTENSIONS:
        assert bool(each.lost) == bool(each.replacement), each
        assert each.lost or not each.ends_run


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
