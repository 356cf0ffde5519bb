"""The terms of the weighted sum: how they are read, their weights and their conditions."""

import re

import pytest
from omegaconf import OmegaConf

from verl_gdpo.algorithm.reward_terms import Condition, RewardTerm, WeightedSum
from verl_gdpo.algorithm.settings import GdpoSettings, hint, plain


def read_terms(rewards):
    return GdpoSettings.from_algorithm({"gdpo": {"rewards": rewards}}).terms


SCHEDULE = {10: 1.0, 20: 0.0, 40: 5.0}


@pytest.mark.parametrize(
    ("step", "weight"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (36, 4.0), (99, 5.0)]
)
def test_a_schedule_is_linear_between_its_points(step, weight):
    term = RewardTerm(SCHEDULE)
    assert term.weight_at(step) == pytest.approx(weight)
    # 2 is missing: it adds nothing
    terms = WeightedSum({"a": term, "b": RewardTerm(2.0), "c": RewardTerm(9.0)})
    total = terms.score({"a": 3.0, "b": 0.5, "c": None}, step)
    assert total == pytest.approx(3 * weight + 1.0)


def test_a_weight_that_is_0_now_and_then_is_used():
    assert RewardTerm(SCHEDULE).is_used and RewardTerm(-0.5).is_used
    assert not RewardTerm({0: 0.0, 9: 0.0}).is_used and not RewardTerm(0.0).is_used


@pytest.mark.parametrize(
    ("weights", "steps", "silent"),
    [
        ({"a": {0: 1, 100: 0}}, None, 100),
        ({"a": {0: 1, 100: 0}}, 99, None),
        ({"a": {0: 1, 100: 0}, "b": 0.1}, None, None),
        ({"a": {0: 1, 100: 0}, "b": 0}, None, 100),
        ({"a": {0: 1, 100: 0}, "b": {99: 0, 100: 1}}, None, None),
        ({"a": {0: 1, 9: 0}, "b": {20: 0, 30: 1}}, None, 9),
        ({"a": {0: 0, 9: 0, 10: 1}}, 5, 1),
        ({"a": {10: -1, 20: 1}}, None, 15),
        ({"a": {0: 0, 1: 1}}, None, None),  # step 0 only validates
    ],
)
def test_the_first_step_without_a_weight(weights, steps, silent):
    terms = read_terms({n: {"weight": w} if isinstance(w, dict) else w for n, w in weights.items()})
    assert terms.silent_step(steps) == silent


def test_points_of_a_schedule_in_any_order():
    terms = read_terms({"a": {"weight": {40: 5, 10: 1.0, 20: 0}}})
    assert list(terms["a"].weight.items()) == [(10, 1.0), (20, 0.0), (40, 5.0)]


def test_values_that_refer_to_others_are_resolved():
    config = OmegaConf.create({"high": 3.0, "rewards": {"a": {"bounds": [0, "${high}"]}}})
    assert plain(config.rewards) == {"a": {"bounds": [0, 3.0]}}
    assert plain(7) == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1", "rewards.a.weight: expected a finite number, got '1'"),
        (True, "rewards.a.weight: expected a finite number, got True"),
        (float("inf"), "rewards.a.weight: expected a finite number, got inf"),
        ({"weight": "1"}, "rewards.a.weight: expected a finite number, got '1'"),
        ({"weight": {5: None}}, "rewards.a.weight.5: expected a finite number, got None"),
        ({"weight": {}}, "rewards.a.weight: expected {step: weight}, got {}"),
        ({"weight": {-1: 1.0}}, "rewards.a.weight.-1: expected at least 0, got -1"),
        ({"weight": {1.5: 1.0}}, "expected a whole number, a training step, got 1.5"),
        ({"weight": {True: 1.0}}, "expected a whole number, a training step, got True"),
        ({"wieght": 1}, "rewards.a.wieght: unknown setting; did you mean 'weight'?"),
        (
            {"otherwise": "zero"},
            "rewards: got {'a': {'otherwise': 'zero'}}; a.otherwise needs a.when",
        ),
        (
            {"when": {"reward": "b", "at_least": 0}, "otherwise": "none"},
            "rewards.a.otherwise: expected one of ['zero', 'missing'], got 'none'",
        ),
        ({"when": "b"}, "rewards.a.when: expected {reward: NAME, at_least: NUMBER}, got 'b'"),
        (
            {"when": {"reward": "b"}},
            "rewards.a.when.at_least: expected {reward: NAME, at_least: NUMBER}",
        ),
        (
            {"when": {"reward": "b", "at_least": 0, "at_most": 1}},
            "rewards.a.when.at_most: unknown setting; did you mean 'at_least'?",
        ),
        (
            {"when": {"reward": "b", "at_least": "1"}},
            "rewards.a.when.at_least: expected a finite number, got '1'",
        ),
        (
            {"when": {"reward": "a", "at_least": 0}},
            "rewards.a.when.reward: expected another reward than 'a'",
        ),
        (
            {"when": {"reward": "score", "at_least": 0}},
            "rewards.a.when.reward: got 'score'; 'score' is verl's name for the sum",
        ),
        (
            {"when": {"reward": 1, "at_least": 0}},
            "rewards.a.when.reward: got 1; name 1: expected text",
        ),
        ({"bounds": "01"}, "rewards.a.bounds: expected [lowest, highest], got '01'"),
        ({"bounds": [0, 1, 2]}, "rewards.a.bounds: expected [lowest, highest], got [0, 1, 2]"),
        ({"bounds": [0, None]}, "rewards.a.bounds.1: expected a finite number, got None"),
        (
            {"bounds": [1, 0]},
            "rewards.a.bounds: got [1, 0]; expected the lowest value below the highest",
        ),
    ],
)
def test_what_cannot_be_meant_is_named(value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_terms({"a": value})


def test_everything_that_can_be_said_of_a_reward():
    said = {
        "weight": 0.5,
        "when": {"reward": "b", "at_least": 1},
        "otherwise": "missing",
        "bounds": [-3, 3],
    }
    expected = RewardTerm(0.5, Condition("b", 1.0), "missing", (-3.0, 3.0))
    assert read_terms({"a": said}) == {"a": expected}
    assert read_terms({"a": {}}) == {"a": RewardTerm(1.0, None, "zero", None)}
    assert read_terms({7: 1}) == {"7": RewardTerm(1.0)}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({}, "rewards: expected at least one reward with a weight; got none"),
        ({"a": None}, "rewards: expected at least one reward with a weight; got none"),
        ({"a": 1, "score": 1}, "rewards.score: got 'score'; 'score' is verl's name for the sum"),
        (
            {"a": 0, "b": {"weight": {0: 0}}},
            "rewards: expected at least one reward with a weight; all weights are 0",
        ),
        (
            {"a": 1, "reward": 1},
            "rewards.reward: got 'reward'; name 'reward': it is a metric of verl's validation",
        ),
        (
            {"a/b": 1},
            "rewards.a/b: got 'a/b'; name 'a/b': expected text that can be printed, without '/'",
        ),
        (
            {"a": {"when": {"reward": "uid", "at_least": 1}}},
            "rewards.a.when.reward: got 'uid'; name 'uid': it is a column of verl's dumps",
        ),
    ],
)
def test_rewards_that_cannot_be_meant(rewards, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_terms(rewards)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"gdpo_reward_keys": "ab"},
            "gdpo_reward_keys: expected a list of different names, got 'ab'",
        ),
        (
            {"gdpo_reward_keys": [1]},
            "gdpo_reward_keys: expected a list of different names, got [1]",
        ),
        (
            {"gdpo_reward_keys": ["b", "a", "b"]},
            "gdpo_reward_keys: expected a list of different names",
        ),
        (
            {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": "1"},
            "gdpo_reward_weights: expected 1 numbers, one for each of gdpo_reward_keys=['a'], "
            "got '1'",
        ),
        (
            {"gdpo_reward_keys": ["a"], "gdpo_reward_weights": ["1"]},
            "algorithm.gdpo_reward_weights.a.weight: expected a finite number, got '1'",
        ),
    ],
)
def test_verls_lists_that_cannot_be_meant(algorithm, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        GdpoSettings.from_algorithm(algorithm)


def test_verls_lists_are_another_way_to_say_rewards():
    keys = {"gdpo_reward_keys": ["b", "a"]}
    assert GdpoSettings.from_algorithm(keys).rewards == {"b": RewardTerm(1.0), "a": RewardTerm(1.0)}
    weighted = {**keys, "gdpo_reward_weights": [2, 0.5]}
    assert GdpoSettings.from_algorithm(OmegaConf.create(weighted)).rewards == {
        "b": RewardTerm(2.0),
        "a": RewardTerm(0.5),
    }
    assert GdpoSettings.from_algorithm({}).rewards is None
    for both in (keys, {"gdpo_reward_weights": [1.0]}):
        with pytest.raises(ValueError, match="say the same thing; give one of them"):
            GdpoSettings.from_algorithm({**both, "gdpo": {"rewards": {"a": 1}}})


def test_hints_name_what_is_close_or_else_everything():
    assert hint("formt", ["correctness", "format", "formal"]) == "; did you mean 'format'?"
    assert hint(3, ["a", "b"]) == "; known: ['a', 'b']"
    assert hint("GRPO", ["gdpo", "grpo"]) == "; did you mean 'grpo'?"
