"""Factors with given shares: found wherever they exist, in whatever basin a solver would start."""

import numpy as np
import pytest

from verl_gdpo.algorithm.zero import SAME_SHARE
from verl_gdpo.tools.share_weights import factors_with_shares, shares


def problem(seed, rewards):
    """Q of rewards that correlate, and factors; their shares can be below 0."""
    rng = np.random.default_rng([seed, rewards])
    mixture_KK = rng.normal(size=(rewards, rewards)) + rng.uniform(0, 2) * np.eye(rewards)
    c_BK = rng.normal(size=(200, rewards)) @ mixture_KK
    return c_BK.T @ c_BK, np.exp(rng.normal(0, 1.5, rewards))


@pytest.mark.parametrize("rewards", [1, 2, 3, 4])
def test_factors_that_exist_are_found_from_any_start(rewards):
    has_share_below_0 = False
    for seed in range(8):
        square_KK, factor_K = problem(seed, rewards)
        target_K = shares(square_KK, factor_K)
        has_share_below_0 |= bool((target_K < 0).any())
        far_K = 10.0 ** np.random.default_rng(seed).uniform(-4, 4, rewards)
        found = factors_with_shares(square_KK, target_K, far_K)
        assert found.is_exact and found.factor_K.max() == 1 and (found.factor_K > 0).all()
        assert shares(square_KK, found.factor_K) == pytest.approx(target_K, abs=2 * SAME_SHARE)
    assert has_share_below_0 == (rewards > 1)


@pytest.mark.parametrize("correlation", [-0.9, 0.0, 0.5])
def test_two_rewards_beside_a_scan_of_the_ratio(correlation):
    """The share changes its side of the target between two ratios, or no ratio has it."""
    square_KK = np.array([[1.0, correlation], [correlation, 1.0]])
    scan = [(1.0, ratio) for ratio in np.geomspace(1e-5, 1e5, 2_001)]
    reached = np.array([shares(square_KK, np.array(pair))[0] for pair in scan])
    answers = set()
    for target in np.linspace(-2.5, 3.5, 13) + 0.003:
        exists = reached.min() < target < reached.max()
        found = factors_with_shares(square_KK, np.array([target, 1 - target]), np.ones(2))
        assert found.is_exact == exists
        answers.add(bool(exists))
    assert answers == {True, False}


@pytest.mark.parametrize(("near", "expected"), [(0.01, 0.1950), (1.0, 0.8550)])
def test_of_two_solutions_the_one_that_is_nearer(near, expected):
    """With the correlation -.9 and the share 1.2, 1.2 x x - 1.26 x + .2 = 0."""
    square_KK = np.array([[1.0, -0.9], [-0.9, 1.0]])
    found = factors_with_shares(square_KK, np.array([1.2, -0.2]), np.array([1.0, near]))
    assert found.factor_K.tolist() == pytest.approx([1, expected], abs=1e-4)


def test_of_several_solutions_for_three_rewards_the_nearest():
    """The third reward has a share below 0, by a small factor or by a large one."""
    square_KK = np.array([[1.0, 0.0, -0.9], [0.0, 1.0, 0.0], [-0.9, 0.0, 1.0]])
    small_K = np.array([1.0, 0.5, 0.1])
    target_K = shares(square_KK, small_K)
    ratios = set()
    for near in (0.01, 1.0):
        found = factors_with_shares(square_KK, target_K, np.array([1.0, 0.5, near]))
        assert found.is_exact
        ratios.add(round(float(found.factor_K[2]), 3))
    assert len(ratios) == 2 and 0.1 in ratios


def test_the_nearest_where_none_exist():
    """The first share is 1 / (1 + x x) without a correlation: at most 1."""
    found = factors_with_shares(np.eye(2), np.array([1.1, -0.1]), np.ones(2))
    assert not found.is_exact and found.missed == pytest.approx(0.1)
    assert found.share_K.tolist() == pytest.approx([1, 0])
    # Two rewards that cancel have any share in one place only in the limit.
    cancel_KK = np.array([[1.0, -1.0], [-1.0, 1.0]])
    found = factors_with_shares(cancel_KK, np.array([0.5, 0.5]), np.ones(2))
    assert np.isfinite(found.factor_K).all() and np.isfinite(found.missed)
