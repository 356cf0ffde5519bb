"""What a list of reward functions says of itself, and what it refuses before a run starts."""

from contextlib import nullcontext

import pytest
from listed_functions import config_of, manager_of, score, written
from omegaconf import OmegaConf

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.settings import SettingsError
from verl_gdpo.hooks.configuration import settings_of_run
from verl_gdpo.scoring.function_list import algorithm_of, check_sources, silence

pytestmark = pytest.mark.usefixtures("event_loop")


@pytest.fixture
def file(tmp_path):
    return written(tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "length"}, "x: got none of path, task and judge; expected path="),
        ({"path": "FILE", "task": "gsm8k"}, "got .'path', 'task'. of path"),
        ({"path": "gone.py"}, "reward_functions.x.path=gone.py: no such file"),
        ({"path": "FILE", "name": "lenght"}, "no such function; did you mean 'length'"),
        ({"path": "FILE", "name": "length", "limits": 3}, r"takes no \['limits'\]; it takes"),
        ({"path": "FILE", "name": "needs"}, r"asks for \['threshold'\], which nothing"),
        ({"task": "gsm9k"}, "x.task=gsm9k: unknown; did you mean 'gsm8k'"),
        ({"task": "tool_rl", "max_corectness": 1}, "does not take it; did you mean 'max_correctne"),
        ({"task": "tool_rl", "max_correctness": 0}, "x: tool_rl max_correctness: got 0"),
        ({"task": "gsm8k", "name": "integer"}, r"x.name=integer: .*a task has none.*x.weight={KEY"),
        ({"task": "tool_rl", "rewards": ["a"]}, r"rewards=.* a task declares its rewards"),
        ({"task": "tool_rl", "weight": {"formt": 1}}, "'formt' is none of its rewards; did you"),
        ({"path": "FILE", "name": "whole", "rewards": "a"}, r"expected the keys of .* or number"),
        ({"path": "FILE", "name": "whole", "rewards": ["a", "a"]}, "expected the keys of the num"),
        ({"path": "FILE", "rewards": ["a", "b"], "weight": {"c": 1}}, "'c' is none of its rewards"),
        ({"path": "FILE", "rewards": "number", "weight": {"c": 1}}, "weight=.'c': 1.: it has one"),
        ({"path": "FILE", "name": "by_position"}, r"takes \['solution_str'\] by position alone"),
        ({"path": "FILE", "name": "anything"}, r"takes \*args alone, .* would get nothing"),
        ({"path": "FILE", "name": "in_c"}, "x: no signature found for builtin"),
        ({"path": "FILE", "name": "length", "required": False}, "is never 0 here"),
        ({"path": "FILE", "name": "length", "sources": "s"}, "expected a list, such as"),
        ({"task": "gsm8k", "group": True}, "only a function of `path` can have it"),
        (
            {"path": "FILE", "name": "length", "group": True},
            r"asks for \['solution_str'\], .* take data_source, solution_strs, ground_truth",
        ),
        ({"path": "FILE", "name": "rank"}, r"asks for \['solution_strs', 'extra_infos'\]"),
    ],
)
def test_what_a_list_refuses_when_it_is_loaded(file, entry, message):
    named = {key: file if value == "FILE" else value for key, value in entry.items()}
    with pytest.raises(ValueError, match=message):
        manager_of(config_of({"x": named}))


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            [{"path": "a.py"}],
            r"reward_functions=.*a.py.*: expected {NAME: {path: FILE.py, name: FU",
        ),
        (
            "a.py",
            r"reward_functions=a.py: expected {NAME: .*: \+reward.reward_functions.NAME.path=",
        ),
        (
            {"x": "a.py"},
            r"functions.x=a.py: expected keys, such as \+reward.reward_functions.x.path=",
        ),
        ({"x": ["a.py"]}, r"reward_functions.x=\['a.py'\]: expected keys, such as"),
    ],
)
def test_a_list_of_another_form_says_which_one_is_expected(functions, message):
    with pytest.raises(SettingsError, match=message):
        settings_of_run(config_of(functions))


def test_weights_of_the_list_are_those_of_the_settings(file):
    entries = {
        "x": {"path": file, "name": "length", "weight": 2.0},
        "w": {"path": file, "name": "whole", "weight": {"a": 1.0, "b": {0: 3.0, 50: 4.0}}},
        "s": {"path": file, "name": "length", "weight": {0: 1.0, 50: 0.0}},
        "y": {"path": file, "name": "lone"},
    }
    config = config_of(entries)
    weights = {
        "x": 2.0,
        "w__a": 1.0,
        "w__b": {"weight": {0: 3.0, 50: 4.0}},
        "s": {"weight": {0: 1.0, 50: 0.0}},
        "y": 1.0,
    }
    expected = read_settings({"adv_estimator": "gdpo", "gdpo": {"rewards": weights}})
    assert settings_of_run(config).rewards == expected.rewards
    assert read_settings(algorithm_of(config)).rewards == expected.rewards
    assert score(config)["reward_score"] == 2 * 1 + 1 * 1 + 3.02 * 0.5 + 0.98 * 1 + 1 * 1.5
    same = config_of(entries, gdpo={"rewards": weights})
    assert settings_of_run(same).rewards == expected.rewards
    other = config_of(entries, gdpo={"rewards": {**weights, "x": 1.0}})
    with pytest.raises(ValueError, match="both say what a reward weighs"):
        settings_of_run(other)
    without = config_of({"x": {"path": file, "name": "length"}})
    assert settings_of_run(without).rewards is None


def test_a_single_function_beside_the_list_is_refused(file):
    config = config_of({"x": {"path": file, "name": "length"}})
    config.reward.custom_reward_function.path = "mine.py"
    moved = r"\+reward.reward_functions.NAME.path=mine.py \+reward.*NAME.name=compute_score"
    with pytest.raises(ValueError, match=moved):
        settings_of_run(config)
    config.reward.custom_reward_function.path = None
    config.reward.reward_manager.name = "naive"
    with pytest.raises(ValueError, match="only the manager gdpo reads the list"):
        settings_of_run(config)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"adv_estimator": "grpo"}, "the rewards are summed first"),
        ({"gdpo": {"group_norm": "summed"}}, "the rewards are summed first"),
        (
            {"gdpo": {"rewards": {"x": 1.0, "y": {"when": {"reward": "x", "at_least": 1}}}}},
            "a condition asks for it",
        ),
        ({}, None),
    ],
)
def test_a_missing_reward_must_not_count_as_a_low_one(file, algorithm, message):
    entries = {name: {"path": file, "name": "length"} for name in "xy"}
    entries["x"] |= {"on_error": "missing", "rewards": "number"}
    config = config_of(entries, **algorithm)
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        settings_of_run(config)


@pytest.mark.parametrize(
    ("entry", "asked"),
    [
        ({}, True),
        ({"rewards": "number"}, False),
        ({"weight": 2.0}, False),
        ({"on_error": "drop"}, False),
        ({"on_error": "stop", "sources": ["t"]}, False),
    ],
)
def test_what_nothing_tells_is_asked_before_the_start(file, entry, asked):
    entry = {"path": file, "name": "number", "on_error": "missing", **entry}
    config = config_of({"other": {"path": file, "name": "length"}, "x": entry})
    lines = r"x.rewards=number; if .* a dict, its keys: \+reward.reward_functions.x.rewards=\[KEY"
    with pytest.raises(ValueError, match=lines) if asked else nullcontext():
        settings_of_run(config)
    if not asked:
        response = "r" if "sources" in entry else "fail"
        assert score(config, response=response)["reward_extra_info"]["x"] is None


def test_rewards_that_no_function_of_the_list_returns(file):
    entries = {"form": {"task": "tool_rl"}, "x": {"path": file, "name": "two"}}
    rewards = {"form__formt": 1.0, "x__x": 1.0}
    with pytest.raises(ValueError, match=r"names 'form__formt', which .*form does not return; did"):
        settings_of_run(config_of(entries, gdpo={"rewards": rewards}))
    settings_of_run(config_of(entries, gdpo={"rewards": {"form__format": 1.0, "x__z": 1.0}}))


def test_interpolations_of_the_block_are_read_beside_a_weight(file):
    entries = {"x": {"path": file, "name": "length", "weight": 2.0}}
    config = config_of(entries, gdpo={"eps": "${my.eps}"}, kl="${my.eps}")
    config.my = {"eps": 0.5, "block": {"eps": 0.25}}
    before = OmegaConf.to_yaml(config)
    settings = settings_of_run(config)
    assert (settings.eps, settings.terms.weights_at(1)) == (0.5, {"x": 2.0})
    assert OmegaConf.to_yaml(config) == before
    assert score(config)["reward_score"] == 2.0
    config.algorithm.gdpo = "${my.block}"
    assert settings_of_run(config).eps == 0.25


@pytest.mark.parametrize(
    "name", ["gdpo_error", "gdpo_notes", "gdpo_own_score", "gdpo_keys", "gdpo_rubric", "uid"]
)
def test_names_that_are_taken(file, name):
    config = config_of({name: {"path": file, "name": "length"}})
    for refuse in (settings_of_run, manager_of):
        with pytest.raises(ValueError, match=f"reward_functions: name '{name}.*rename it"):
            refuse(config)


def test_a_name_with_a_dot_is_silenced(file):
    entries = {name: {"path": file, "name": "length"} for name in ("a.b", "c")}
    config = config_of(entries)
    silence(config, ["a.b"])
    assert {*config.reward.reward_functions} == {"a.b", "c"}
    assert score(config)["reward_extra_info"] == {"a.b": None, "c": 1.0, "score": 1.0}


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        (None, None),
        ([], None),
        (["s"], None),
        (["S"], r"x.sources=\['S'\]: no training or validation row .*; did you mean 's'\?. The"),
        (["S", "T"], "would never be called"),
        (
            ["s", "maht"],
            ["no row has data_source 'maht'; did you mean 'math'?"],
        ),
    ],
)
def test_sources_that_no_row_has(file, listed, told):
    config = config_of({"x": {"path": file, "name": "length", "sources": listed}})
    refuses = pytest.raises(ValueError, match=told) if isinstance(told, str) else nullcontext()
    with refuses:
        where = f"reward.reward_functions.x.sources={listed}: "
        assert check_sources(config, {"s"}, {"math"}) == [where + each for each in told or []]
