"""Intervals of shares, beside published examples and how often they hold the truth."""

import numpy as np
import pytest

from verl_gdpo.tools.evaluate.proportions import paired_difference, weighted_sum, wilson


def pairs(both, only_first, only_second, neither):
    """Questions that the first, the second, both or neither answered right."""
    first = [1] * both + [1] * only_first + [0] * only_second + [0] * neither
    second = [1] * both + [0] * only_first + [1] * only_second + [0] * neither
    return np.array(first, float), np.array(second, float)


def test_wilsons_interval_is_that_of_scipy():
    from scipy.stats import binomtest

    for count in (1, 8, 80):
        for right in (0, 1, count // 2, count):
            expected = binomtest(right, count).proportion_ci(method="wilson")
            got = wilson(right, count)
            assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        # Newcombe 1998, table II, method 10: cells e, f, g, h give e + f less e + g
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((36, 14, 0, 0), 0.1528, 0.4167),
    ],
)
def test_a_paired_difference_is_that_of_the_paper(table, low, high):
    first, second = pairs(*table)
    got = paired_difference(second, first)  # the paper's difference has the other sign
    assert (got.low, got.high) == pytest.approx((low, high), abs=2e-4)


def test_the_interval_holds_the_truth_in_95_of_100():
    rng = np.random.default_rng(1)
    held = 0
    tries = 2000
    for _ in range(tries):
        estimates = [wilson(int(rng.binomial(n, p)), n) for n, p in ((8, 0.1), (12, 0.7))]
        mean = weighted_sum(estimates, [0.5, 0.5])
        held += mean.low <= 0.4 <= mean.high
    assert 0.93 * tries < held < 0.985 * tries
