"""How the advice is counted on runs that no rule was made on."""

import pytest

from verl_gdpo.tools.advice.rules import read_rules
from workshop.experiments.map import held_out
from workshop.experiments.map.arms import FIRST_ARMS
from workshop.experiments.map.held_out import Case, cases, cost_of, drawn_settings, row
from workshop.experiments.map.settings import SETTINGS


def test_the_cost_of_advice_by_hand():
    earned = {"gdpo": 0.9, "grpo": 0.85, "grpo_range": 0.88, "grpo_prompt_range": 0.95}
    assert cost_of(["gdpo", "grpo"], earned) == pytest.approx(0.05)  # its worst arm
    assert cost_of(["gdpo"], earned) == 0  # nobody knows the range of each prompt
    assert cost_of(["grpo_range"], earned) == pytest.approx(0.02)
    assert cost_of([], earned) == 0


def test_the_rates_by_hand():
    found = [Case("a", True, True, 0.01), Case("a", True, False, 0.03), Case("b", False, True, 0.5)]
    # one of three is not sure; of the two others of one setting, one is the rule and one is right
    assert row("x", found) == ["x", "3", "0.33", "0.50", "0.50 to 0.50", "0.50", "0.50 to 0.50"]


def test_every_drawn_setting_has_what_its_arms_earned():
    earned = held_out.earned_in_drawn()
    assert [*earned] == [*drawn_settings()] and not {*earned} & {*SETTINGS}
    assert all([*of_one] == [*FIRST_ARMS] for of_one in earned.values())
    assert {*held_out.earned_in_map()} == {*SETTINGS}


def test_a_setting_is_counted():
    earned = dict.fromkeys(FIRST_ARMS, 0.9) | {"grpo": 0.8}
    found = [*cases({"two, 20:1": SETTINGS["two, 20:1"]}, {"two, 20:1": earned}, 30)]
    assert [(case.is_sure, case.is_the_rule, case.is_right) for case in found] == [(True,) * 3] * 4
    assert "gdpo" in read_rules()[-1].arms
