"""The options with which a run called a scorer."""

from functools import partial

import pytest
from omegaconf import OmegaConf

from verl_gdpo.tasks import TASKS
from verl_gdpo.tools.run_folder.scorer_options import (
    options_of_function,
    options_of_task,
    value_of,
)

SCORER = "here/my_rewards.py:short"


def of_config(reward):
    return partial(value_of, OmegaConf.create({"reward": reward}))


def short(limit, **keys):
    return {"path": "there/my_rewards.py", "name": "short", "limit": limit, **keys}


def test_other_functions_and_tasks_have_other_options():
    single = {"path": "there/my_rewards.py", "name": "long", "reward_kwargs": {"limit": 2}}
    listed = {
        "other_file": short(3, path="there/rewards.py"),
        "other_task": {"task": "gsm8k", "normalize_numbers": True},
        "usual_name": {"path": "there/my_rewards.py", "limit": 4},
        "empty": None,
    }
    config = of_config({"custom_reward_function": single, "reward_functions": listed})
    assert options_of_function(SCORER, config, is_validation=False) == {}
    usual = "my_rewards.py:compute_score"
    assert options_of_function(usual, config, is_validation=False) == {"limit": 4}
    assert options_of_task(TASKS["tool_rl"], config, is_validation=False) == {}
    assert options_of_function(SCORER, partial(value_of, None), is_validation=False) == {}


def test_a_validation_may_have_other_options():
    listed = {"a": short(1, validation="never"), "b": short(2, validation="only")}
    config = of_config({"reward_functions": listed})
    assert options_of_function(SCORER, config, is_validation=False) == {"limit": 1}
    assert options_of_function(SCORER, config, is_validation=True) == {"limit": 2}


def test_several_options_of_one_scorer_are_refused():
    config = of_config({"reward_functions": {"a": short(1), "b": short(2)}})
    with pytest.raises(ValueError, match=r"short: .*reward_functions\.b.*'limit': 2.*Write a fun"):
        options_of_function(SCORER, config, is_validation=False)
    listed = {"a": {"task": "math_length", "seconds": 1}, "b": {"task": "math_length"}}
    with pytest.raises(ValueError, match="math_length: the run called it with different options"):
        options_of_task(
            TASKS["math_length"], of_config({"reward_functions": listed}), is_validation=False
        )
    config = of_config({"reward_functions": {"a": short(1), "b": short(1, sources=["x"])}})
    assert options_of_function(SCORER, config, is_validation=False) == {"limit": 1}
