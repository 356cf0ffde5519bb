from dataclasses import replace

import numpy as np
import pytest

from verl_gdpo.evaluation import ScoreColumn
from verl_gdpo.evaluation.results import QuestionScores, numbers


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
    # all of a are right and none of b: drawn from both at once, the share of a would vary
    made = [*problems("a", 1, 1, 1), *problems("b", 0, 0, 0)]
    number = only(ScoreColumn("all", parts=(leaf("a"), leaf("b")), by_questions=True), made)
    assert number.interval == (0.5, 0.5)


def test_the_intervals_of_differences_are_paired_by_problem():
    # whatever is drawn, each problem differs by 0.1: the interval has no width
    rng = np.random.default_rng(0)
    before = [QuestionScores("a", {"right": value}) for value in rng.random(50)]
    after = [QuestionScores("a", {"right": one.scores["right"] + 0.1}) for one in before]
    (number,) = numbers(lambda _: [leaf("a")], after, less=before)
    assert number.value == pytest.approx(0.1)
    assert number.interval == pytest.approx((0.1, 0.1))


def test_the_same_seed_gives_the_same_intervals():
    column = ScoreColumn("mean", parts=(leaf("a"), leaf("b")))
    assert only(column, A_AND_B) == only(column, A_AND_B)
