from dataclasses import replace

import numpy as np
import pytest

from verl_gdpo.tools.evaluate.benchmark import ScoreColumn
from verl_gdpo.tools.evaluate.numbers import QuestionScores, numbers
from verl_gdpo.tools.evaluate.results import _shown


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
    # Each problem differs by 0.1 and a hundredth; the scores themselves by half of their range.
    rng = np.random.default_rng(0)
    before = [QuestionScores("a", {"right": value}) for value in rng.random(50)]
    differences = 0.1 + 0.01 * rng.normal(size=50)
    after = [
        QuestionScores("a", {"right": one.scores["right"] + difference})
        for one, difference in zip(before, differences, strict=True)
    ]
    (number,) = numbers(lambda _: [leaf("a")], after, less=before)
    assert number.value == pytest.approx(differences.mean())
    half = 1.96 * differences.std(ddof=1) / np.sqrt(50)
    expected = (number.value - half, number.value + half)
    assert number.interval == pytest.approx(expected, abs=0.2 * half)
    # The same answers again have no interval, as whatever is drawn, nothing differs.
    (same,) = numbers(lambda _: [leaf("a")], before, less=before)
    assert (same.value, same.interval) == (0, None)


def toolrl(rng, size):
    """Correctness as ToolRL's: most answers are right, and the others anything."""
    return np.where(rng.random(size) < 0.6, 3.0, rng.uniform(-3, 3, size))


LAWS = {
    "normal": (lambda rng, size: rng.normal(size=size), 0.0),
    "exponential": (lambda rng, size: rng.exponential(size=size), 1.0),
    "thirds": (lambda rng, size: rng.choice([0, 0.5, 1], p=[0.2, 0.3, 0.5], size=size), 0.65),
    "toolrl": (toolrl, 1.8),
    "mean of 8 samples": (lambda rng, size: rng.binomial(8, rng.beta(0.5, 0.5, size)) / 8, 0.5),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("count", [8, 30])
def test_intervals_of_few_scores_hold_the_truth(law, count):
    """In 92 of 100 at least, also of eight; those of the drawn values themselves in 83 to 90."""
    rng = np.random.default_rng(0)
    draw, truth = LAWS[law]
    held = []
    for values in draw(rng, (300, count)):
        interval = only(leaf("a"), problems("a", *values)).interval
        if interval is not None:
            held.append(interval[0] <= truth <= interval[1])
    assert len(held) > 280
    assert np.mean(held) > 0.905  # of 300 tries


def test_the_interval_of_many_scores_is_that_of_the_normal_law():
    values = np.random.default_rng(0).normal(2.0, 1.0, size=400)
    low, high = only(leaf("a"), problems("a", *values)).interval
    half = 1.96 * values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.01)


def test_a_number_over_answers_has_the_error_of_a_quotient():
    """Questions with many answers count more; the delta method says by how much."""
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, size=200)
    rights = rng.binomial(counts, rng.beta(2, 2, size=200))
    made = [
        QuestionScores("a", {}, {"format": (float(right), int(count))})
        for right, count in zip(rights, counts, strict=True)
    ]
    column = ScoreColumn("format", category="a", score="format", over_answers=True)
    number = only(column, made)
    residuals = rights - number.value * counts
    half = 1.96 * np.sqrt((residuals**2).sum()) / counts.sum()
    expected = (number.value - half, number.value + half)
    assert number.interval == pytest.approx(expected, abs=0.1 * half)


def test_fewer_scores_than_eight_say_too_little():
    assert only(leaf("a"), problems("a", 0.5, 1, 2, 3, 4, 5, 6)).interval is None
    assert only(leaf("a"), problems("a", 0.5, 1, 2, 3, 4, 5, 6, 7)).interval is not None
    # Of the mean of two categories, each has to have them.
    column = ScoreColumn("mean", parts=(leaf("a"), leaf("b")))
    few = [*problems("a", *[0.1 * k for k in range(20)]), *problems("b", 0.5, 1, 2)]
    assert only(column, few).interval is None
    enough = [*few, *problems("b", 3, 4, 5, 6, 7)]
    low, high = only(column, enough).interval
    assert low < 2.26 < high


def applying_to(few, values):
    """60 questions, of which some have a score."""
    made = [QuestionScores("a", {"other": 1.0}) for _ in range(60)]
    for place, value in zip(few, values, strict=True):
        made[place] = QuestionScores("a", {"other": 1.0, "right": float(value)})
    return made


def test_a_score_of_few_questions_has_the_interval_of_these():
    """As if the questions to which a reward does not apply were not there."""
    few = (3, 17, 40, 41, 59)
    for values in ((1, 1, 0, 1, 1), (1, 1, 1, 1, 1), (0.5, 1, 2, 3, 4)):
        number = only(leaf("a"), applying_to(few, values))
        assert number == only(leaf("a"), problems("a", *values))
        assert number.questions == 5

    # Of the mean of two categories, each has to have enough of them.
    column = ScoreColumn("mean", parts=(leaf("a"), leaf("b")))
    made = [*applying_to(few, (0.5, 1, 2, 3, 4)), *problems("b", *[0.1 * k for k in range(20)])]
    number = only(column, made)
    assert (number.questions, number.interval) == (25, None)


def test_a_difference_of_few_questions_has_the_interval_of_these():
    few = (3, 17, 40, 41, 59)
    before, after = (1, 0, 0, 0, 0), (1, 1, 1, 0, 1)
    of_few, of_all = [
        numbers(lambda _: [leaf("a")], second, less=first)
        for first, second in (
            (applying_to(few, before), applying_to(few, after)),
            (problems("a", *before), problems("a", *after)),
        )
    ]
    assert of_few == of_all and of_few[0].interval is not None
    # Where the reward applies to other questions, there are no pairs, and too few scores.
    others = applying_to((3, 17, 40, 41, 50), before)
    (number,) = numbers(lambda _: [leaf("a")], applying_to(few, after), less=others)
    assert number.value == pytest.approx(0.6) and number.interval is None


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
    small = only(leaf("a"), problems("a", *[-0.0000271] * 8))
    assert _shown(small, False)[0] == "-2.71e-05"


def test_a_difference_of_eight_right_and_wrong_answers_has_a_width():
    wrong, right = problems("a", *[0] * 8), problems("a", *[1] * 8)
    (number,) = numbers(lambda _: [leaf("a")], wrong, less=wrong)
    assert number.value == 0 and number.interval[0] < -0.3 and number.interval[1] > 0.3
    (number,) = numbers(lambda _: [leaf("a")], right, less=wrong)
    assert number.value == 1 and 0.5 < number.interval[0] < 0.6 and number.interval[1] == 1


def test_the_same_seed_gives_the_same_intervals():
    column = ScoreColumn("mean", parts=(leaf("a"), leaf("b")))
    assert only(column, A_AND_B) == only(column, A_AND_B)
