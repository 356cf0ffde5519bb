"""What is usual for a metric, and the trend of the latest validations."""

import math

import pytest

from verl_gdpo.run.levels import RECENT, USUAL, Level, Validations, trends


def test_a_trend_by_hand():
    # 0 1 0 1 0: second differences -2 2 -2, noise sqrt(12 / 6 / 3); the last four fall by nothing
    found = dict(trends([0.0, 1.0, 0.0, 1.0, 0.0], 4))
    assert found[0] == pytest.approx(0)
    # 1 0 1 0 around the middle index 1.5: -1.5 + .5 = -1; sum of squares 5
    assert found[1] == pytest.approx(-1 / (2 / 3) ** 0.5 / 5**0.5)
    assert {*found} == {0, 1}


def test_the_levels_of_a_reward_by_hand():
    level = Level()
    for step in range(USUAL):
        level.add_mean(0.4 + 0.2 * (step % 2))
    assert level.start == pytest.approx(0.5) and level.best == -math.inf
    for _ in range(RECENT):
        level.add_mean(0.1)
    # the differences of the first 20 are all .2: their noise is sqrt(.04 / 2)
    assert (level.best, level.recent) == (pytest.approx(0.5), pytest.approx(0.1))
    assert level.noise == pytest.approx(0.02**0.5)
    assert level.total == pytest.approx(20 * 0.5 + 5 * 0.1) and level.count == 25


def test_training_between_two_validations():
    level, validations = Level(), Validations()
    validations.add(0, 0.9, level)  # before any training
    for value in (0.2, 0.4):
        level.add_mean(value)
    validations.add(2, 0.5, level)
    validations.add(2, 0.5, level)  # nothing was trained since
    level.add_mean(0.9)
    validations.add(3, math.nan, level)
    validations.add(3, 0.6, level)
    assert [*validations.steps] == [2, 3]
    assert [*validations.trained] == [pytest.approx(0.3), pytest.approx(0.9)]


def test_how_sure_a_fall_has_to_be():
    known = Validations()
    bounds = {}
    for count in range(1, 101):
        known.values.append(0.5)
        bounds[count] = known.sure_enough(rise_of_training=2.0)
    # 1.7 + 30 over the number, and 0.05 for each one beyond 30
    assert [bounds[n] for n in (8, 30, 50, 100)] == pytest.approx([5.45, 2.7, 3.3, 5.5])
    assert min(bounds, key=bounds.get) == 30
    assert known.sure_enough(rise_of_training=0.0) == pytest.approx(5.5 + 1)
