from dataclasses import replace

import numpy as np
import pytest

from verl_gdpo.tools.evaluate.benchmark import ScoreColumn
from verl_gdpo.tools.evaluate.results import QuestionScores, _shown, numbers


def problems(category, *values):
    return [QuestionScores(category, {"right": float(value)}) for value in values]


def leaf(category):
    return ScoreColumn(category, category=category, score="right")


A_AND_B = [*problems("a", 1, 0, 0, 0), *problems("b", 1, 1)]


def only(column, of):
    number, *_ = numbers(lambda _: [column], of)
    return number


def test_a_part_that_was_not_run_gives_no_number_and_no_zero():
    column = ScoreColumn("mean", parts=(leaf("a"), leaf("not run")))
    for one in (column, replace(column, by_questions=True)):
        made = numbers(lambda _, one=one: [one], A_AND_B)
        assert [(one.name, one.value) for one in made] == [
            ("mean", None),
            ("  a", 0.25),
            ("  not run", None),
        ]
        assert made[0].interval is None


def test_a_number_over_answers_counts_each_answer():
    # two questions with 1 of 1 and 0 of 3 answers in the format: 1 of 4, not the mean of 1 and 0
    made = [QuestionScores("a", {}, {"format": counted}) for counted in ((1.0, 1), (0.0, 3))]
    column = ScoreColumn("format", category="a", score="format", over_answers=True)
    assert only(column, made).value == 0.25


def test_no_answer_at_all_gives_no_number():
    column = ScoreColumn("format", category="a", score="format", over_answers=True)
    assert only(column, [QuestionScores("a", {})]).value is None


def test_a_question_without_the_score_does_not_count():
    made = [*problems("a", 1, 0), QuestionScores("a", {"other": 1.0})]
    assert only(leaf("a"), made).value == 0.5
    assert only(ScoreColumn("x", category="a", score="nothing"), made).value is None


def test_the_interval_of_a_share_is_that_of_the_normal_law():
    # 400 problems, 100 right: 0.25 +- 1.96 * sqrt(0.25 * 0.75 / 400) = 0.25 +- 0.0424
    low, high = only(leaf("a"), problems("a", *[1] * 100, *[0] * 300)).interval
    assert low == pytest.approx(0.2076, abs=0.005) and high == pytest.approx(0.2924, abs=0.005)


def test_problems_are_drawn_within_each_category():
    # all of a score 0.9 and all of b 0.1: drawn from both at once, the share of a would vary
    made = [*problems("a", 0.9, 0.9, 0.9), *problems("b", 0.1, 0.1, 0.1)]
    number = only(ScoreColumn("all", parts=(leaf("a"), leaf("b")), by_questions=True), made)
    assert number.value == pytest.approx(0.5) and number.interval is None


def test_the_intervals_of_differences_are_paired_by_problem():
    # whatever is drawn, each problem differs by 0.1: the interval has no width
    rng = np.random.default_rng(0)
    before = [QuestionScores("a", {"right": value}) for value in rng.random(50)]
    after = [QuestionScores("a", {"right": one.scores["right"] + 0.1}) for one in before]
    (number,) = numbers(lambda _: [leaf("a")], after, less=before)
    assert number.value == pytest.approx(0.1)
    assert number.interval == pytest.approx((0.1, 0.1))


def test_eight_wrong_answers_are_no_certainty():
    # Wilson: 0 of 8 is 0 to 1.96**2 / (8 + 1.96**2) = 3.8415 / 11.8415
    low, high = only(leaf("a"), problems("a", *[0] * 8)).interval
    assert low == 0.0 and high == pytest.approx(0.32441, abs=1e-5)
    # the mean of two categories, each with half of the width: 0.5 +- sqrt(2) * 0.5 * 0.32441
    both = [*problems("a", *[0] * 8), *problems("b", *[1] * 8)]
    low, high = only(ScoreColumn("mean", parts=(leaf("a"), leaf("b"))), both).interval
    assert low == pytest.approx(0.5 - 0.5 * 0.32441, abs=1e-5)
    assert high == pytest.approx(0.5 + 0.5 * 0.32441, abs=1e-5)


def test_scores_that_are_all_the_same_and_no_shares_have_no_interval():
    number = only(leaf("a"), problems("a", *[-3] * 8))
    assert (number.value, number.interval) == (-3, None)
    assert _shown(number, False) == ("-3.000", "-")


def test_a_difference_of_eight_right_and_wrong_answers_has_a_width():
    wrong, right = problems("a", *[0] * 8), problems("a", *[1] * 8)
    (number,) = numbers(lambda _: [leaf("a")], wrong, less=wrong)
    assert number.value == 0 and number.interval[0] < -0.3 and number.interval[1] > 0.3
    (number,) = numbers(lambda _: [leaf("a")], right, less=wrong)
    assert number.value == 1 and 0.5 < number.interval[0] < 0.6 and number.interval[1] == 1


def test_the_same_seed_gives_the_same_intervals():
    column = ScoreColumn("mean", parts=(leaf("a"), leaf("b")))
    assert only(column, A_AND_B) == only(column, A_AND_B)
