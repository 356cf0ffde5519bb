"""The rules of `rules.yaml`: what they are keyed on, and where each applies."""

import pytest

from verl_gdpo.tools.advice import read_rules, rule_of, rules_file
from verl_gdpo.tools.advice.evidence import Measured
from workshop.experiments.map.compare import FIRST_ARMS, settings
from workshop.experiments.results import read_simulated

EQUAL = Measured(2, 0.97, 0.0, 1.0, 1.0, 1.0, 0.0, 1.2, 1.0)
OF_NO_SETTING = {"one reward", "same", "cancel"}  # true by the equation


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "equal"),
        ({"spread_ratio": 2.0, "varies_ratio": 0.4}, "large and learned"),
        ({"spread_ratio": 2.0, "varies_ratio": 1.0}, "large"),
        ({"spread_ratio": 2.0, "varies_ratio": 2.0}, "large and not learned"),
        ({"spread_ratio": 1.9, "varies_ratio": 0.4}, "equal"),
        ({"correlation": 0.8, "spread_ratio": 4.0}, "condition"),
        ({"prompt_factor": 3.0}, "by prompt, alike"),
        ({"prompt_factor": 3.0, "varies_alike": 2.0}, "by prompt"),
        ({"together": 0.0, "spread_ratio": 6.0}, "exclude"),
        ({"together": 0.0}, "equal"),
        ({"opposite": -0.99, "spread_ratio": 6.0}, "cancel"),
        ({"agree": 1.0, "correlation": 1.0}, "same"),
        ({"rewards": 1, "agree": 1.0}, "one reward"),
    ],
)
def test_the_rule_that_applies(changed, expected):
    assert rule_of(EQUAL._replace(**changed)).name == expected


def test_the_rules_are_keyed_on_quantities_that_are_explained():
    assert {*rules_file()["quantities"]} == {*Measured._fields}
    rules = read_rules()
    assert {name for rule in rules for name in rule.bounds} == {*Measured._fields}
    assert not rules[-1].bounds and all(rule.bounds for rule in rules[:-1])
    for low, high in (bounds for rule in rules for bounds in rule.bounds.values()):
        assert low < high


def test_the_arms_of_a_rule_are_those_that_its_words_name():
    for rule in read_rules():
        assert {*rule.arms} <= {*FIRST_ARMS}, rule.name
        words = rule.train_with
        if words.startswith("either"):
            assert {*rule.arms} == {"gdpo", "grpo"}
        else:
            assert ("gdpo" in rule.arms) == words.startswith("GDPO"), rule.name
        assert ("grpo_range" in rule.arms) == ("divided by their ranges" in words), rule.name


def test_every_rule_applies_to_a_setting_of_the_simulation():
    applied = {rule_of(read_simulated()[name].measured).name for name in settings()}
    assert applied == {rule.name for rule in read_rules()} - OF_NO_SETTING
    for rewards in rules_file()["rewards"]:
        assert {*rewards["nearest"]} <= {*settings()}, rewards["name"]
