"""`reward.custom_reward_function`: who loads its file, as verl's reward workers ask for it."""

import sys

import pytest
from omegaconf import OmegaConf
from reward_rows import Tokenizer, scored
from verl.trainer.ppo.reward import get_custom_reward_fn, load_reward_manager
from verl_batch import verl_config

FILE = """
from __future__ import annotations

import concurrent.futures
import multiprocessing
from dataclasses import dataclass

import beside_rewards

POOL = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

@dataclass
class Reward:
    value: float

def count(text):
    return Reward(float(len(text)) * beside_rewards.FACTOR)

def compute_score(data_source, solution_str, ground_truth, extra_info, more=0):
    return {"length": POOL.submit(count, solution_str).result().value, "more": float(more)}

async def in_time(data_source, solution_str, ground_truth, extra_info):
    return {"length": 0.0}
"""
PLAIN = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""
MANAGER = """
from verl_gdpo.hooks.reward_manager import GdpoRewardManager

class Mine(GdpoRewardManager):
    pass
"""

pytestmark = pytest.mark.usefixtures("event_loop")


@pytest.fixture
def file(tmp_path):
    (tmp_path / "beside_rewards.py").write_text("FACTOR = 2\n")
    path = tmp_path / "custom_rewards.py"
    path.write_text(FILE)
    yield path
    if "custom_rewards" in sys.modules:
        sys.modules["custom_rewards"].POOL.shutdown()


def config_of(path, *overrides, name="compute_score"):
    function = "reward.custom_reward_function"
    return verl_config(f"{function}.path={path}", f"{function}.name={name}", *overrides)


def test_with_gdpo_the_file_is_a_module(file):
    config = config_of(file, "+reward.custom_reward_function.reward_kwargs.more=3")
    manager = load_reward_manager(config, Tokenizer())
    result = scored(manager, response="four", global_steps=1)
    assert result["reward_extra_info"] == {"length": 8.0, "more": 3.0, "score": 11.0}
    assert sys.modules["custom_rewards"].__file__ == str(file)
    assert config.reward.custom_reward_function.path == str(file)


def test_a_coroutine_function_stays_one(file):
    manager = load_reward_manager(config_of(file, name="in_time"), Tokenizer())
    assert scored(manager, global_steps=1)["reward_extra_info"] == {"length": 0.0, "score": 0.0}


@pytest.mark.parametrize("is_subclass", [True, False])
def test_a_manager_of_ours_is_enough(file, tmp_path, is_subclass):
    """With verl's own estimator."""
    (tmp_path / "mine.py").write_text(MANAGER)
    ours = (
        "reward.reward_manager.source=importlib",
        "reward.reward_manager.name=Mine",
        f"reward.reward_manager.module.path={tmp_path}/mine.py",
    )
    config = config_of(file, "algorithm.adv_estimator=grpo", *(ours if is_subclass else ()))
    load_reward_manager(config, Tokenizer())
    assert "custom_rewards" in sys.modules


def test_without_gdpo_verl_loads_the_file(tmp_path):
    path = tmp_path / "custom_rewards.py"
    path.write_text(PLAIN)
    before = list(sys.path), set(sys.modules)
    overrides = "algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive"
    load_reward_manager(config_of(path, *overrides), Tokenizer())
    function = {"custom_reward_function": {"path": str(path), "name": "compute_score"}}
    of_evaluation = OmegaConf.create({"reward": function})  # of verl.trainer.main_eval
    assert get_custom_reward_fn(of_evaluation)("s", "r", "t", {}) == 1.0
    assert get_custom_reward_fn(OmegaConf.create({"reward": {}})) is None
    assert list(sys.path) == before[0] and "custom_rewards" not in sys.modules
    assert not [name for name in set(sys.modules) - before[1] if "custom_rewards" in name]


def test_a_file_that_cannot_be_used_is_named_with_its_key(tmp_path):
    path = tmp_path / "failing_rewards.py"
    path.write_text("X = 1 / 0\n")
    where = f"reward.custom_reward_function.path={path}"
    with pytest.raises(ValueError, match=rf"^{where}: .*ZeroDivisionError: .* \[{path}:1\]$"):
        load_reward_manager(config_of(path), Tokenizer())
    path.write_text(PLAIN)
    expected = "^reward.custom_reward_function.name=compute: .* did you mean 'compute_score'"
    with pytest.raises(ValueError, match=expected):
        load_reward_manager(config_of(path, name="compute"), Tokenizer())


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        ("response, answer", r"unexpected keyword|missing a required argument: 'response'"),
        ("data_source, solution_str, ground_truth", "unexpected keyword argument 'extra_info'"),
        ("data_source, solution_str, ground_truth, extra_info, url", "argument: 'url'"),
    ],
)
def test_a_function_that_verl_cannot_call_is_told_how_it_calls(tmp_path, signature, reason):
    path = tmp_path / "odd_rewards.py"
    path.write_text(f"def compute_score({signature}):\n    return 1.0\n")
    with pytest.raises(ValueError, match=reason) as raised:
        get_custom_reward_fn(config_of(path))
    assert "reward.custom_reward_function.name=compute_score: " in str(raised.value)
    assert f"it takes ({signature}). verl calls it with the keywords data_source, " in str(
        raised.value
    )


@pytest.mark.parametrize(
    "signature",
    [
        "data_source, solution_str, ground_truth, extra_info=None, **kwargs",
        "data_source, solution_str, ground_truth, extra_info, answer_str",
        "*, solution_str, **_",
        "**_",
    ],
)
def test_a_function_that_verl_can_call_is_loaded(tmp_path, signature):
    path = tmp_path / "even_rewards.py"
    path.write_text(f"def compute_score({signature}):\n    return 1.0\n")
    assert get_custom_reward_fn(config_of(path)) is not None


WITH_ROUTER = "data_source, solution_str, ground_truth, extra_info, reward_router_address"


def test_beside_a_reward_model_a_function_has_to_take_its_router(tmp_path):
    """verl hands it over to each call, and to none without a reward model."""
    path = tmp_path / "routed_rewards.py"
    enabled = "reward.reward_model.enable=True"

    def load(signature, *overrides):
        path.write_text(f"def compute_score({signature}):\n    return 1.0\n")
        sys.modules.pop("routed_rewards", None)
        return get_custom_reward_fn(config_of(path, *overrides))

    assert load(f"{WITH_ROUTER}, reward_model_tokenizer", enabled) is not None
    with pytest.raises(ValueError, match="unexpected keyword argument 'reward_router_address'"):
        load("data_source, solution_str, ground_truth, extra_info", enabled)
    with pytest.raises(ValueError, match="missing a required argument: 'reward_router_address'"):
        load(WITH_ROUTER)
