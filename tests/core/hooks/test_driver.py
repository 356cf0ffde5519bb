"""What is known of a run before verl starts Ray: the data sources of its rows."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verl
from composed_recipes import composed
from omegaconf import OmegaConf
from stand_in import stand_in

from verl_gdpo.hooks import driver, rollout_guard
from verl_gdpo.hooks.before_training import training_sources
from verl_gdpo.hooks.unread_keys import UnreadKeys


def test_verls_main_is_extended_where_it_is_the_main_module(monkeypatch):
    """No import hook sees `python -m verl.trainer.main_ppo`, which runs as `__main__`."""

    def run_ppo(config, task_runner_class):
        raise AssertionError

    file = Path(verl.__path__[0]) / "trainer" / "main_ppo.py"
    for name in (str(file), "another.py"):
        main = SimpleNamespace(run_ppo=run_ppo, __file__=name)
        monkeypatch.setitem(sys.modules, "__main__", main)
        stand_in(driver.check_and_set_device, lambda config: None)(None)
        assert (main.run_ppo is not run_ppo) == (name == str(file))


def never_run(config, task_runner_class=None):
    """Stand for verl's `run_ppo`, where it must not be called."""
    raise AssertionError


def sources(files, **data):
    return training_sources(OmegaConf.create({"data": {"train_files": files, **data}}))


def test_files_say_their_data_sources(tmp_path):
    table, lines = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    pq.write_table(pa.table({"data_source": ["rlla", "mine", "rlla"], "x": [1, 2, 3]}), table)
    lines.write_text(json.dumps({"x": {"y": [1]}, "data_source": "other"}) + "\n")
    assert sources(str(table)) == {"rlla", "mine"}
    assert sources([str(table), str(lines)]) == {"rlla", "mine", "other"}


def test_what_only_verl_can_read(tmp_path):
    without = tmp_path / "c.parquet"
    pq.write_table(pa.table({"x": [1]}), without)
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"x": 1}\n')
    for files in (
        str(without),
        str(lines),
        str(tmp_path / "none.parquet"),
        "hdfs://far/d.parquet",
        None,
        [],
    ):
        assert sources(files) is None
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"data_source": ["rlla"]}), table)
    assert sources(str(table), custom_cls={"path": "mine.py"}) is None
    assert training_sources(OmegaConf.create({})) is None


def test_a_run_without_gdpo_reads_no_rows(monkeypatch):
    """Nor is the end of its trainer named in our words."""

    def forbidden(*_):
        raise AssertionError

    monkeypatch.setattr(driver, "training_sources", forbidden)
    monkeypatch.setattr(rollout_guard, "naming_the_trainer", forbidden)
    config = composed("hardware=cpu", "estimator=grpo")
    config.reward.reward_manager.name = "naive"
    OmegaConf.set_struct(config, False)
    config.run_dir = None
    given = []
    stand_in(driver.check_and_run, lambda config: given.append(config))(config)
    assert given == [config]


@pytest.mark.parametrize("minutes", ["soon", None])
def test_minutes_that_are_no_number_are_refused_before_ray_starts(minutes):
    config = composed("hardware=cpu")
    config.trainer.hang_minutes = minutes
    with pytest.raises(ValueError, match=r"trainer\.hang_minutes=.*expected minutes"):
        stand_in(driver.check_and_run, never_run)(config)


def test_limits_that_only_verls_manager_reads_are_refused_before_ray_starts():
    limits = ["+reward.max_concurrent=2", "+reward.max_rpm=60", "+reward.timeout=30"]
    for estimator in ([], ["estimator=grpo"]):
        config = composed("hardware=cpu", *estimator, *limits)
        with pytest.raises(ValueError, match=r"^reward\.max_concurrent=2, reward\.max_rpm=60"):
            stand_in(driver.check_and_run, never_run)(config)


def test_tags_that_are_no_pairs_are_refused_before_ray_starts():
    config = composed("hardware=cpu", "+reward.thought_tags=[think]")
    with pytest.raises(ValueError, match=r"^reward\.thought_tags=\['think'\]: expected a list of"):
        stand_in(driver.check_and_run, never_run)(config)


@pytest.mark.parametrize("given", [(("runner",), {}), ((), {"task_runner_class": "runner"})])
def test_verls_function_gets_the_runner_where_it_was_given(monkeypatch, given):
    calls = []

    def run_ppo(*args, **kwargs):
        calls.append((args, kwargs))

    monkeypatch.setattr(driver, "check_run", lambda config, runner: None)
    monkeypatch.setattr(driver, "probing", lambda runner: f"probing {runner}")
    config = composed("hardware=cpu")
    args, kwargs = given
    stand_in(driver.check_and_run, run_ppo, like=never_run)(config, *args, **kwargs)
    ((args, kwargs),) = calls
    assert args[0] is config
    assert args[1:] == tuple(f"probing {each}" for each in given[0])
    assert kwargs == {name: f"probing {value}" for name, value in given[1].items()}


@pytest.mark.parametrize(
    ("manager", "words"),
    [
        ("naive", ["algorithm.gdpo={'rewards': {'a': 1}, 'eps': 0.1}: nobody reads it", "score"]),
        ("gdpo", ["algorithm.gdpo.eps=0.1: only the estimator gdpo reads it"]),
    ],
)
def test_a_run_is_warned_of_our_keys_that_nobody_reads_in_it(monkeypatch, capsys, manager, words):
    """With our manager, the rewards have their weights under any estimator."""
    monkeypatch.setattr(driver, "training_sources", lambda config: None)
    monkeypatch.setattr(driver, "find_unread_keys", lambda *_: UnreadKeys())
    gdpo = {"rewards": {"a": 1}, "eps": 0.1}
    config = composed("hardware=cpu", "estimator=grpo")
    OmegaConf.set_struct(config, False)
    config.algorithm.gdpo = gdpo
    config.reward.reward_manager.name = manager
    config.reward.custom_reward_function.path = "mine.py"
    given = []
    stand_in(driver.check_and_run, lambda config: given.append(config))(config)
    assert given == [config]
    (line,) = capsys.readouterr().err.splitlines()
    assert [text for text in words if text not in line] == []
    # Of these, nothing is lost.
    config.algorithm.gdpo = {"rewards": {"a": 1}} if manager == "gdpo" else {"rewards": None}
    stand_in(driver.check_and_run, lambda config: given.append(config))(config)
    assert capsys.readouterr().err == ""
