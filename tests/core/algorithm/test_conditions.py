"""Conditions on penalties: nothing may be better than what meeting the condition can give."""

import math

import numpy as np
import oracle
import pytest
from pages import rows_after

from verl_gdpo.algorithm.conditions import paid_by_bounds, paid_in_batch
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.rubrics import criteria_of
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RUBRIC_KEY

WHEN = {"reward": "right", "at_least": 1}
# right and short, right but long, wrong, wrong
RIGHT, COST = [1.0, 1.0, 0.0, 0.0], [0.0, -3.5, -1.0, -2.0]


def settings_like(**term):
    rewards = {"right": 1.0, "cost": {"when": WHEN, **term}}
    bounds = {"cost": term["bounds"]} if "bounds" in term else {}
    return GdpoSettings(rewards=rewards, bounds=bounds)


def rows_like(costs, rights=RIGHT):
    infos = [{"right": a, "cost": b} for a, b in zip(rights, costs, strict=True)]
    keys = [f"u_{n}_0" for n in range(len(infos))]
    return BatchRows.from_keys(keys, infos, ["d"] * len(infos), [False] * len(infos))


def in_batch(settings, costs, rights=RIGHT, is_summed=False):
    rows = rows_like(costs, rights)
    raw = RewardMatrix.of(rows, settings).raw
    return paid_in_batch(raw, rows, settings, is_summed=is_summed)


def advantages(settings, costs=COST):
    rows = rows_like(costs)
    rewards = RewardMatrix.of(rows, settings)
    return scalars_of(rewards, rows.counted_B, ["u"] * len(rows), settings).A_B.tolist()


def by_loops(costs, present=None):
    rewards = [list(pair) for pair in zip(RIGHT, costs, strict=True)]
    there = [[True, here] for here in present] if present else None
    return oracle.gdpo(rewards, ["u"] * 4, present=there)


@pytest.mark.parametrize(
    ("otherwise", "costs", "present"),
    [
        (None, [0.0, -3.5, 0.0, 0.0], None),
        ("zero", [0.0, -3.5, 0.0, 0.0], None),
        (-3.5, [0.0, -3.5, -3.5, -3.5], None),
        (-2, [0.0, -3.5, -2.0, -2.0], None),
        ("missing", [0.0, -3.5, 0.0, 0.0], [True, True, False, False]),
    ],
)
def test_the_advantages_are_those_of_the_loop(otherwise, costs, present):
    expected = by_loops(costs, present)
    assert advantages(settings_like(otherwise=otherwise)) == pytest.approx(expected, abs=1e-9)


def test_the_table_of_the_page():
    rows = rows_after("docs/rewards.md", "| `otherwise` | right and short |")
    written = [row[0].partition("`")[0] for row in rows]
    assert written == ["zero", "-3.5", "missing"]
    for otherwise, row in zip(("zero", -3.5, "missing"), rows, strict=True):
        computed = [f"{A:.2f}" for A in advantages(settings_like(otherwise=otherwise))]
        assert row[1:] == computed


@pytest.mark.parametrize(
    ("otherwise", "is_paid"),
    [(None, True), ("zero", True), (-1, True), ("missing", False), (-3.5, False), (-4, False)],
)
def test_a_right_answer_that_is_long_is_better_than_a_wrong_one_where_failing_is_not_paid(
    otherwise, is_paid
):
    settings = settings_like(otherwise=otherwise)
    _, long, wrong, _ = advantages(settings)
    if otherwise != -1:  # there the right answer still makes up for it
        assert (long < wrong) == is_paid
    found = in_batch(settings, COST)
    assert [each.is_default for each in found] == ([otherwise is None] if is_paid else [])


@pytest.mark.parametrize(
    ("term", "lowest"),
    [
        ({"bounds": [-3.5, 0]}, "-3.5"),
        ({"bounds": [-3, 3]}, "-3.0"),
        # the smaller a reward with a negative weight, the better
        ({"bounds": [0, 2], "weight": -1}, "2.0"),
        ({"bounds": [-1, 2], "weight": {1: -1, 9: 0}}, "2.0"),
        # no number is the worst for weights of both signs
        ({"bounds": [0, 1], "weight": {1: 1, 9: -1}}, None),
        ({"bounds": [0, 1]}, ""),
        ({"bounds": [-1, 0], "weight": -1}, ""),
        ({"bounds": [-1, 0], "weight": 0}, ""),
        ({"bounds": [-1, 0], "otherwise": "missing"}, ""),
        ({"bounds": [-1, 0], "otherwise": -1}, ""),
        ({}, ""),
    ],
)
def test_bounds_tell_it_before_the_training(term, lowest):
    found = paid_by_bounds(settings_like(**term), is_summed=False)
    assert [each.is_default for each in found] == ([] if lowest == "" else [True])
    for each in found:
        left_out, number = (
            f"'++algorithm.gdpo.rewards={{cost: {{otherwise: {value}}}}}'"
            for value in ("missing", lowest)
        )
        assert left_out in each.message
        assert (number in each.message) == (lowest is not None)


def test_the_message_says_all_of_it():
    (found,) = paid_by_bounds(settings_like(bounds=[-3.5, 0]), is_summed=False)
    line = "'++algorithm.gdpo.rewards={{cost: {{otherwise: {}}}}}'"
    assert found.message == (
        "algorithm.gdpo.rewards.cost: a sample without 'right' of at least 1 gets 0 (the default), "
        "which is better than -3.5, which is within its bounds [-3.5, 0], so that it is "
        "better to fail the condition than to meet it. Choose: to compare only samples that meet "
        "the condition, "
        f"{line.format('missing')}; or to give the others the lowest value, {line.format(-3.5)}. "
        f"To keep 0, write it: {line.format('zero')}"
    )
    (found,) = in_batch(settings_like(weight=-0.5, otherwise="zero"), [0.0, 2.0, 0.0, 0.0])
    assert "gets 0 (otherwise=zero) with weight=-0.5, which is better than 2, which u_1_0 has" in (
        found.message
    )
    assert "To keep 0" not in found.message


@pytest.mark.parametrize(
    ("costs", "is_paid"),
    [
        ([0.0, 0.5, 1.0, 0.0], False),
        ([0.0, 0.0, -0.5, 0.0], True),  # of a sample that fails the condition
        ([None, -0.5, None, None], True),
        ([None, None, None, None], False),
        ([0.0, -1e-9, 0.0, 0.0], False),  # what rounding leaves of 0
        ([1000.0, -1e-4, 0.0, 0.0], False),
    ],
)
def test_the_first_batch_with_a_negative_value_tells_it(costs, is_paid):
    assert bool(in_batch(settings_like(), costs)) == is_paid


def test_a_missing_reward_counts_as_0_where_rewards_are_summed_first():
    given = settings_like(otherwise="missing", bounds=[-3.5, 0])
    (found,) = paid_by_bounds(given, is_summed=True)
    assert not found.is_default and "otherwise=missing, as rewards are summed" in found.message
    assert "otherwise: missing" not in found.message  # which would not help
    assert in_batch(given, COST, is_summed=True) and not in_batch(given, COST)


RUBRICS = [
    # weights, values of the two right answers, paid, the lowest value
    ({"a": 2, "b": 1}, ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}), False, None),
    ({"a": 2, "b": 1}, ({"a": 1.0, "b": -0.5}, {"a": 0.0, "b": 1.0}), True, "-0.5"),
    # the sum is above 0, but of b a failing sample would have the best value
    ({"a": 2, "b": -1}, ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 0.0}), True, None),
    ({"a": -2, "b": -1}, ({"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 0.0}), True, "3.0"),
    ({"a": 2, "b": -1}, ({"a": 1.0, "b": None}, {"a": 1.0, "b": None}), False, None),
]


@pytest.mark.parametrize(("weights", "values", "is_paid", "lowest"), RUBRICS)
def test_each_criterion_of_a_rubric_is_looked_at(weights, values, is_paid, lowest):
    none = dict.fromkeys(weights, 0.0)
    infos = []
    for right, of_sample in zip(RIGHT, (*values, none, none), strict=True):
        key = f"{RUBRIC_KEY}cost"
        infos.append({"right": right, "cost": None, key: criteria_of(of_sample, weights)})
    rows = BatchRows.from_keys([f"u_{n}_0" for n in range(4)], infos, ["d"] * 4, [False] * 4)
    settings = settings_like()
    found = paid_in_batch(RewardMatrix.of(rows, settings).raw, rows, settings, is_summed=False)
    assert bool(found) == is_paid
    for each in found:
        assert choices_of(each.message) == (["missing"] if lowest is None else ["missing", lowest])
        assert "which a criterion of u_" in each.message


def choices_of(message):
    choices = message.partition("Choose: ")[2].partition("To keep 0")[0]
    return [part.partition("}")[0] for part in choices.split("otherwise: ")[1:]]


def test_nothing_is_better_than_what_meeting_can_give_unless_it_is_found():
    """Drawn penalties, weights and values of `otherwise`, against the rule said in one line."""
    random = np.random.default_rng(0)
    paid = 0
    for _ in range(300):
        low, high = np.sort(random.integers(-3, 4, size=2)).tolist()
        weight, fallback = random.choice([-2.0, -0.5, 0.5, 2.0]), float(random.integers(-4, 5))
        if low == high:
            continue
        given = settings_like(bounds=[low, high], weight=float(weight), otherwise=fallback)
        found = paid_by_bounds(given, is_summed=False)
        costs = random.integers(low, high + 1, size=4).astype(float).tolist()
        seen = in_batch(given, costs)
        assert bool(found) == (weight * fallback > min(weight * low, weight * high))
        assert bool(seen) == (weight * fallback > min(weight * cost for cost in costs))
        paid += len(found)
    assert 50 < paid < 250


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "lowest", [0], "0"])
def test_what_otherwise_cannot_be(value):
    with pytest.raises(ValueError, match="expected zero, missing or a finite number"):
        settings_like(otherwise=value)
