"""What counts as zero: each question on both sides of its border, and no tolerance elsewhere."""

import tokenize
from math import sqrt
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.equation import normalize_groups


def above(x):
    return np.nextafter(x, np.inf)


def step_1(rewards, present=None, eps=None):
    """z_BK and the ranges of one group, and the arguments of `sum_without_rounding` behind S."""
    rewards_BK = torch.tensor(rewards, dtype=torch.float64)
    present_BK = torch.ones_like(rewards_BK) if present is None else torch.tensor(present)
    group_B = torch.zeros(len(rewards), dtype=torch.int64)
    return *normalize_groups(rewards_BK, present_BK.bool(), group_B, 1, eps=eps), group_B


def is_rounding(S, rewards, weights, precision, eps=None):
    """Whether this S counts as 0 in a group with these rewards."""
    _, ranges, group_B = step_1(rewards, eps=eps)
    S_B = torch.full((len(rewards),), S, dtype=torch.float64)
    weights_K = torch.tensor(weights, dtype=torch.float64)
    precision_K = torch.full_like(weights_K, precision)
    result_B = zero.sum_without_rounding(S_B, weights_K, group_B, ranges, precision_K)
    assert ((result_B == 0) | (result_B == S_B)).all()
    return not result_B.any()


@pytest.mark.parametrize("width", [0, 1, 7, 8, 9, 300])
def test_which_rows_train_a_token(width):
    mask_BT = torch.eye(width + 2, width, dtype=torch.bool)  # two rows train none
    for mask in (mask_BT, mask_BT.T.contiguous().T, mask_BT.flip(1)):
        assert zero.has_tokens(mask).tolist() == [True] * width + [False] * 2


@pytest.mark.parametrize(
    ("value", "dtype", "precision"),
    [
        (0.1, torch.float64, zero.EPS64),
        (0.1, torch.float32, zero.EPS32),
        (0.1, torch.float16, zero.EPS64),
        (7.0, torch.float32, zero.EPS64),
        (-(2.0**24), torch.float32, zero.EPS64),
        (2.0**24 + 2, torch.float32, zero.EPS32),  # 2^24 + 1 may have become it
    ],
)
def test_how_exactly_rewards_are_known(value, dtype, precision):
    rewards_BK = torch.tensor([[value, 0.0], [1.0, 0.0]], dtype=dtype).double()
    assert zero.precision_of(rewards_BK, dtype).tolist() == [precision, zero.EPS64]


def test_how_much_of_a_sum_may_be_rounding():
    # std = sqrt(8) and sqrt(2). Half the precision of the largest value twice, and EPS64 / 2 for
    # 2 terms of the mean and 2 of the sum over the rewards
    rewards, eps = [[-3.0, 7.0], [1.0, 5.0]], 0.5
    share = 2**-50 + 4 * zero.EPS64 / 2
    bound = 2 * share * 3 / (sqrt(8) + eps) + share * 7 / (sqrt(2) + eps)
    assert is_rounding(bound, rewards, [2.0, -1.0], 2**-50, eps)
    assert is_rounding(-bound, rewards, [2.0, -1.0], 2**-50, eps)
    assert not is_rounding(1.0001 * bound, rewards, [2.0, -1.0], 2**-50, eps)


def test_at_most_a_quarter_of_the_range_is_rounding():
    rewards = [[-3.0, 7.0], [1.0, 5.0]]
    assert is_rounding(4 / 4 + 2 / 4, rewards, [1.0, 1.0], 1.0)
    assert not is_rounding(above(1.5), rewards, [1.0, 1.0], 1.0)


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [
        ([[0.1], [0.2]], [1.0]),
        ([[0.1, 7.3], [0.2, 7.3]], [1.0, 1.0]),  # the other is constant
        ([[0.1, 0.5], [0.2, 0.7]], [1.0, 0.0]),  # or counts nothing
    ],
)
def test_a_reward_that_varies_alone_is_taken_at_its_word(rewards, weights):
    # half of EPS64 for each term of the mean and of the sum, and EPS64: nothing of the precision
    bound = (1 + (2 + len(weights)) / 2) * zero.EPS64 * 0.2
    assert is_rounding(0.999 * bound, rewards, weights, 2**-20)
    assert not is_rounding(1.001 * bound, rewards, weights, 2**-20)
    assert is_rounding(1.001 * bound, [[0.1, 0.5], [0.2, 0.7]], [1.0, 1.0], 2**-20)


def test_nothing_is_rounding_where_no_reward_varies():
    _, ranges, group_B = step_1([[7.0], [7.0]])
    assert not ranges.varies_GK.any()
    S_B = torch.tensor([1e-300, 0.0], dtype=torch.float64)  # a variant may give it
    one_K = torch.ones(1, dtype=torch.float64)
    assert zero.sum_without_rounding(S_B, one_K, group_B, ranges, one_K).tolist() == [1e-300, 0.0]


def test_a_mean_that_is_rounding():
    S_B = torch.tensor([3.0, -5.0, 1.0], dtype=torch.float64)
    bound = 3 * 5 * zero.EPS64
    for mean, expected in ((bound, 0.0), (-bound, 0.0), (above(bound), above(bound))):
        mean = torch.tensor(mean, dtype=torch.float64)
        assert zero.mean_without_rounding(mean, S_B).item() == expected


def test_a_centred_value_that_is_rounding():
    values_B = np.array([5.0, -8.0])
    bound = 1e-9 * 8
    centred_B = np.array([bound, -above(bound)])
    assert zero.centred_without_rounding(centred_B, values_B).tolist() == [0.0, -above(bound)]
    assert zero.centred_without_rounding(centred_B[:0], values_B[:0]).tolist() == []


def test_rewards_that_differ_in_their_last_digits():
    columns = [[0.1 + 0.2, 5.0], [0.3, 5.0 + 1e-12], [-2.0, 10.0]]
    same, other = zero.without_last_digits(np.array(columns)).T
    assert same[0] == same[1] != same[2]
    assert zero.without_last_digits(np.zeros((2, 1))).tolist() == [[0.0], [0.0]]
    assert other[0] == other[1] == 0.5  # 1e-13 of the largest value
    far, farther = zero.without_last_digits(np.array([[1.0], [1.0 - 2e-12]]))[:, 0]
    assert far != farther


def test_what_a_scorers_float32_leaves_of_nothing():
    border = np.array([1e-8, -1e-8, above(1e-8), -above(1e-8)])
    assert zero.is_0(border).tolist() == [True, True, False, False]
    assert zero.or_0(border).tolist() == [0.0, 0.0, *border[2:]]


def test_a_signal_is_more_than_rounding_and_the_residue_of_eps():
    S_B = np.array([1e-8, above(1e-8), 0.002, -0.0021])
    c_BK = np.array([[1e-8, 0.0], [1e-8, 0.0], [1.0, -1.0], [1.0, -1.0]])
    assert zero.has_signal(S_B, c_BK).tolist() == [False, True, False, True]


def test_a_mean_that_is_about_0():
    assert zero.is_mean_0(-1e-8, 0.0) and not zero.is_mean_0(above(1e-8), 0.0)
    assert zero.is_mean_0(-2e-6, 2.0) and not zero.is_mean_0(above(2e-6), 2.0)


def test_how_far_float32_may_miss_a_bound():
    assert zero.with_slack((-1.0, 3.0)) == (-1.0, 3.0, 4e-6)


def test_means_outside_of_a_range():
    means = np.array([-0.0001, 0.0, sum([0.1] * 3) / 3, np.float32(0.1), 0.1001, np.nan])
    outside = [True, False, False, False, True, False]
    assert zero.is_outside(means, 0.0, 0.1).tolist() == outside


@pytest.mark.parametrize("least", [1.0, 0.9, -3.0, 1e6])
def test_a_value_that_float32_holds_meets_its_condition(least):
    slack = 1e-6 * abs(least)
    assert zero.is_at_least(float(np.float32(least)), least)
    assert zero.is_at_least(least - 0.9 * slack, least)
    assert not zero.is_at_least(least - 1.1 * slack, least)
    assert not zero.is_at_least(np.nan, least)


def test_a_condition_of_0_takes_nothing_below_0():
    assert zero.is_at_least(0.0, 0.0) and not zero.is_at_least(-1e-9, 0.0)


@pytest.mark.parametrize(("total", "may_miss"), [(0.0, 1e-5), (0.5, 1e-5), (-4e6, 40.0)])
def test_a_score_that_is_the_sum(total, may_miss):
    scores = total + may_miss * np.array([-0.999, 0.999, -1.001, 1.001])
    assert zero.is_the_sum(scores, total).tolist() == [True, True, False, False]
    assert not zero.is_the_sum(np.nan, total)


def test_advantages_that_agree_in_6_decimals():
    result = zero.to_6_decimals(np.array([0.5000004, 0.5, 0.5000006, -4e-7]))
    assert result[0] == result[1] != result[2]
    assert str(result[3]) == "0.0"  # and not -0.0


def test_the_spread_of_advantages_that_were_a_constant_in_float32():
    # the std of 1 - s and 1 + s is s
    assert zero.std_or_0(np.array([1 - 0.9e-6, 1 + 0.9e-6])) == 0.0
    assert zero.std_or_0(np.array([1 - 1.1e-6, 1 + 1.1e-6])) == pytest.approx(1.1e-6)


def test_advantages_that_are_apart():
    assert zero.is_apart(np.array([1e-3, -1e-3, above(1e-3)])).tolist() == [False, False, True]


# --- and nowhere else ----------------------------------------------------------------------------

# numbers such as 1e-6 in modules of the mathematics, which say something else with them
OTHERS = {"settings.py": ["1e-4", "1e-6", "1e-6", "1e-8"]}  # the eps of each dialect


def test_no_other_module_of_the_mathematics_has_a_tolerance():
    numbers_of = {}
    for path in sorted(Path(zero.__file__).parent.glob("*.py")):
        with path.open("rb") as file:
            numbers = [
                token.string
                for token in tokenize.tokenize(file.readline)
                if token.type == tokenize.NUMBER and "e-" in token.string
            ]
        if numbers:
            numbers_of[path.name] = sorted(numbers)
    assert numbers_of.pop("zero.py")
    assert numbers_of == OTHERS
