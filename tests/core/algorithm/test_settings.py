"""The records of the settings: names, weights, conditions and schedules."""

import pickle

import pytest
import torch

from verl_gdpo.algorithm.settings import (
    Condition,
    GdpoSettings,
    RewardTerm,
    SettingsError,
    WeightedSum,
    hint,
)

SCHEDULE = {40: 5, 10: 1.0, 20: 0}  # in any order


@pytest.mark.parametrize(
    ("step", "weight"), [(0, 1.0), (10, 1.0), (15, 0.5), (20, 0.0), (36, 4.0), (40, 5.0), (99, 5.0)]
)
def test_a_schedule_is_linear_between_its_points(step, weight):
    term = RewardTerm(SCHEDULE)
    assert list(term.weight.items()) == [(10, 1.0), (20, 0.0), (40, 5.0)]
    assert term.weight_at(step) == pytest.approx(weight)
    # c is missing: it adds nothing
    terms = WeightedSum({"a": term, "b": RewardTerm(2.0), "c": RewardTerm(9.0)})
    total = terms.score({"a": 3.0, "b": 0.5, "c": None}, step)
    assert total == pytest.approx(3 * weight + 1.0)


def test_a_condition_is_met_by_what_float32_holds_of_its_value():
    # 9 of 10, as the mean of a tensor
    passed = torch.tensor([1.0] * 9 + [0.0]).mean().item()
    assert passed < 0.9
    terms = WeightedSum({"short": RewardTerm(when=Condition("passed", 0.9))})
    assert terms.score({"short": 1.0, "passed": passed}) == 1.0
    assert terms.score({"short": 1.0, "passed": 0.8}) == 0.0


def test_a_schedule_needs_the_step():
    with pytest.raises(ValueError, match=r"needs the training step.* set a number as weight"):
        RewardTerm(SCHEDULE).weight_at(None)
    assert RewardTerm(2.0).weight_at(None) == 2.0


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
    terms = GdpoSettings(
        rewards={name: {"weight": weight} for name, weight in weights.items()}
    ).terms
    assert terms.silent_step(steps) == silent


def test_a_condition_may_read_what_is_not_trained_on():
    of_b, of_c = ({"when": {"reward": reward, "at_least": 0}} for reward in "bc")
    assert GdpoSettings(rewards={"a": of_b, "b": of_c}).names == ["a", "b", "c"]


def test_terms_for_what_a_scorer_returned():
    returned = ["score", "correctness", "format"]
    every = {"correctness": RewardTerm(), "format": RewardTerm()}
    assert GdpoSettings().terms_for(returned) == every
    assert GdpoSettings(rewards={"format": 2.0}).terms_for(returned) == {"format": RewardTerm(2.0)}
    with pytest.raises(ValueError, match="no named reward"):
        GdpoSettings().terms_for(["score"])
    condition = {"when": {"reward": "corectness", "at_least": 1}}
    with pytest.raises(ValueError, match=r"reward 'formt' is configured.*did you mean 'format'"):
        GdpoSettings(rewards={"formt": 1.0}).terms_for(returned)
    with pytest.raises(ValueError, match=r"reward 'corectness' is configured.*'correctness'\?"):
        GdpoSettings(rewards={"format": condition}).terms_for(returned)


@pytest.mark.parametrize(
    ("name", "known", "end"),
    [
        ("formt", ["correctness", "format", "formal"], "; did you mean 'format'?"),
        (3, ["a", "b"], "; known: ['a', 'b']"),
        ("GRPO", ["gdpo", "grpo"], "; did you mean 'grpo'?"),
    ],
)
def test_hints_name_what_is_close_or_else_everything(name, known, end):
    assert hint(name, known) == end


def test_all_bounds_that_a_variant_needs_are_asked_for_at_once():
    settings = GdpoSettings(combine="sa_mrpo", bounds={"b": (0.0, 1.0)})
    with pytest.raises(SettingsError) as raised:
        settings.combine_for({"a": 1.0, "b": 1.0, "c": 0.5, "unused": 0.0})
    asked = [message.split(",")[0] for message in raised.value.mistakes]
    assert asked == [
        f"algorithm.gdpo.combine=sa_mrpo needs the bounds of reward {name!r}" for name in "ac"
    ]


def test_an_error_of_several_mistakes_in_another_process():
    error = SettingsError(["a=1: too low", "b: of two\nlines", "a=1: too low"])
    assert str(error) == "the configuration has 2 mistakes:\n  a=1: too low\n  b: of two lines"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.mistakes) == (str(error), error.mistakes)
    assert str(SettingsError(["one:\nas it is"])) == "one:\nas it is"
