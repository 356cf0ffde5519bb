"""The advantage, compared with the paper's numbers, a naive loop, and laws that must hold."""

import itertools
import re
from math import comb, sqrt

import numpy as np
import oracle
import pytest
import torch
from drawn_batches import batches, random_batch
from hypothesis import given
from hypothesis import strategies as st
from numbers_of_examples import draw
from parity_batch import PARITY_GROUPS, PARITY_REWARDS, mask_of

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.equation import compute_gdpo_scalars, plain_gdpo

GRPO = {"group_norm": "summed", "batch_norm": "none"}


def per_sample(rewards, groups, **options):
    mask = torch.ones(len(rewards), 1)
    return compute_gdpo_advantage(torch.tensor(rewards), groups, mask, **options)[:, 0].tolist()


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "grpo", "grpo_without_std", "gdpo"),
    [
        ([[0, 0], [0, 1]], [-0.7071, 0.7071], [-0.5, 0.5], [-0.7071, 0.7071]),
        ([[0, 1], [1, 1]], [-0.7071, 0.7071], [-0.5, 0.5], [-0.7071, 0.7071]),
        # both rewards agree: GRPO cannot tell it from the line above
        ([[0, 0], [1, 1]], [-0.7071, 0.7071], [-1, 1], [-1.4142, 1.4142]),
        ([[1, 0], [0, 1]], [0, 0], [0, 0], [0, 0]),
    ],
)
def test_toy_table(rewards, grpo, grpo_without_std, gdpo):
    def of(**options):
        return pytest.approx(per_sample(rewards, [7, 7], eps=0, **options), abs=5e-5)

    assert grpo == of(**GRPO)
    assert grpo_without_std == of(**GRPO, normalize_by_std=False)
    assert gdpo == of(batch_norm="none")


def test_two_groups_in_one_batch():
    rewards, groups = [[0, 0], [0, 1], [0, 0], [1, 1]], ["x", "x", "y", "y"]
    # S = -s, s, -2s, 2s with s = 1/sqrt(2); std S = sqrt((2 * .5 + 2 * 2) / 3) = sqrt(5/3)
    unit = 1 / sqrt(2) / sqrt(5 / 3)
    expected = [-unit, unit, -2 * unit, 2 * unit]
    assert per_sample(rewards, groups, eps=0) == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx([-0.5477, 0.5477, -1.0954, 1.0954], abs=5e-5)
    default_eps = per_sample(rewards, groups)
    assert default_eps[1::2] == pytest.approx([0.54768, 1.09536], abs=5e-6)


OF_TWO_REWARDS = [3, 6, 14, 26, 38, 59, 81, 109, 145, 186]


def distinct_advantage_groups(n, G, **options):
    """Of all multisets of rollouts; or of rewards, which are fewer where n is above G."""
    size, length = (G, n) if n <= G else (n, G)
    vectors = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * length)
    groups = list(itertools.combinations_with_replacement(range(2**length), size))
    rewards = vectors[torch.tensor(groups)]
    rewards = (rewards if n <= G else rewards.mT).reshape(-1, n)
    ids = np.repeat(np.arange(len(groups)), G)
    A_B = compute_gdpo_scalars(rewards, ids, eps=0, **options).A_B
    sorted_GG = A_B.reshape(-1, G).sort(dim=1).values
    return len({*map(tuple, (sorted_GG * 1e6).round().tolist())})


@pytest.mark.parametrize(
    ("n", "G", "gdpo", "grpo"),
    [
        *((2, G, gdpo, comb(G, 2) + 1) for G, gdpo in enumerate(OF_TWO_REWARDS, 2)),
        *((3, 4, 45, 14), (4, 4, 127, 23), (5, 4, 318, 41)),
        pytest.param(6, 4, 722, 56, marks=pytest.mark.slow),
    ],
)
def test_count_of_distinct_advantage_groups(n, G, gdpo, grpo):
    assert distinct_advantage_groups(n, G, batch_norm="none") == gdpo
    assert distinct_advantage_groups(n, G, **GRPO) == grpo
    if n == 2:
        without_std = distinct_advantage_groups(n, G, **GRPO, normalize_by_std=False)
        assert without_std == comb(G + 1, 2)


@pytest.mark.parametrize(("ones", "high", "low"), [(1, 1.5, -0.5), (2, 0.8660, -0.8660)])
def test_binary_group_of_four(ones, high, low):
    # s = sqrt(k (G - k) / (G (G - 1))): sqrt(3/12) = .5 for k = 1, sqrt(4/12) for k = 2
    rewards = [[1]] * ones + [[0]] * (4 - ones)
    z = per_sample(rewards, [0] * 4, eps=0, batch_norm="none")
    assert z == pytest.approx([high] * ones + [low] * (4 - ones), abs=5e-5)


def test_token_and_sample_batch_norm():
    # S = -.7071, .7071, 0, 0 with 10, 30, 20, 20 tokens
    rewards, groups, lengths = [[0], [1], [5], [5]], [0, 0, 1, 1], [10, 30, 20, 20]

    def first_token(batch_norm):
        advantages = compute_gdpo_advantage(
            rewards, groups, mask_of(lengths), batch_norm=batch_norm, eps=0
        )
        return advantages[:, 0].tolist()

    # tokens: mean = .7071 * 20/80 = .1768, variance = (.5 * 40 - 80 * .1768^2) / 79
    assert first_token("token") == pytest.approx([-1.878, 1.1268, -0.3756, -0.3756], abs=5e-4)
    # samples: mean 0, std = sqrt(1 / 3)
    assert first_token("sample") == pytest.approx([-1.2247, 1.2247, 0, 0], abs=5e-5)


# --- the plain form ------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**31),
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    weights=st.lists(st.sampled_from([-1.0, 0.25, 1.0, 3.0]), min_size=1, max_size=4),
    decimals=st.sampled_from([0, 1, 16]),  # with few, rewards tie, and some are constant
    eps=st.sampled_from([1e-6, 1e-4, 0.1]),
)
def test_the_plain_form_equals_the_full_function(seed, sizes, weights, decimals, eps):
    rng = np.random.default_rng(seed)
    group_B = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    rewards_BK = rng.normal(size=(sum(sizes), len(weights))).round(decimals)
    full = compute_gdpo_scalars(rewards_BK, group_B, weights=weights, eps=eps)
    plain_B = plain_gdpo(
        torch.from_numpy(rewards_BK),
        torch.from_numpy(group_B),
        torch.tensor(weights, dtype=torch.float64),
        eps,
    )
    torch.testing.assert_close(plain_B, full.A_B, rtol=0, atol=1e-7)


def test_the_plain_form_gives_the_numbers_of_two_groups():
    # They are those of `test_two_groups_in_one_batch`, with the eps of the paper.
    rewards_BK = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 1]], dtype=torch.float64)
    A_B = plain_gdpo(rewards_BK, torch.tensor([4, 4, 7, 7]), torch.ones(2, dtype=torch.float64))
    assert A_B.tolist() == pytest.approx([-0.54768, 0.54768, -1.09536, 1.09536], abs=5e-6)


# --- the naive loop as oracle --------------------------------------------------------------------

REWARD = st.one_of(
    st.sampled_from([-3.0, 0.0, 0.1, 0.3, 1.0, 3.0, 2000.3]),
    st.floats(-100, 100, allow_nan=False, width=32),
)


@draw(times=3)
@given(
    batch=batches(REWARD, st.floats(-3, 3, width=32)),
    eps=st.sampled_from([1e-6, 1e-4, 0.1]),
    group_norm=st.sampled_from(["per_reward", "summed"]),
    batch_norm=st.sampled_from(["sample", "token", "none"]),
    normalize_by_std=st.booleans(),
)
def test_equals_the_naive_loop(batch, **options):
    expected = oracle.gdpo(**batch, **options)
    actual = compute_gdpo_scalars(
        torch.tensor(batch["rewards"], dtype=torch.float64),
        batch["groups"],
        token_count_B=torch.tensor(batch["lengths"]),
        weights=batch["weights"],
        present_BK=batch["present"],
        valid_B=batch["valid"],
        **options,
    ).A_B
    assert actual.tolist() == pytest.approx(expected, abs=1e-6, rel=1e-6)


# --- laws ----------------------------------------------------------------------------------------


scalars = compute_gdpo_scalars


@pytest.mark.parametrize("constant", [0.1, 0.3, 2000.3, -3.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [0, 1e-4])
def test_a_constant_reward_contributes_exactly_zero(constant, dtype, eps):
    varied = torch.tensor([[0.0], [1.0], [3.0], [1.0], [1.0]], dtype=dtype)
    both = torch.cat([varied, torch.full_like(varied, constant)], dim=1)
    result = scalars(both, [0] * 5, eps=eps)
    assert result.z_BK[:, 1].tolist() == [0.0] * 5
    assert result.A_B.tolist() == scalars(varied, [0] * 5, eps=eps).A_B.tolist()


def test_three_rewards_do_not_cancel_though_their_sums_tie():
    rewards = [[0, 0, 1], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    S = per_sample(rewards, [0] * 4, batch_norm="none", eps=0)
    # z(1), z(0): .8660, -.8660 at two ones of four; 1.5, -.5 at one
    low, high = 0.8660254 - 0.5 - 0.5, 1.5 - 0.8660254 - 0.5
    assert pytest.approx([low, low, high, high], abs=1e-6) == S
    assert (low, high) == pytest.approx((-0.13397, 0.13397), abs=5e-6)
    assert per_sample(rewards, [0] * 4, **GRPO) == [0.0] * 4


def test_singleton_is_zero_and_counts_in_the_batch():
    alone = per_sample([[0], [1]], [0, 0], eps=0)
    beside = per_sample([[0], [1], [9]], [0, 0, 1], eps=0)
    assert alone == pytest.approx([-0.7071, 0.7071], abs=5e-5)
    # S = -.7071, .7071, 0: std = sqrt(1 / 2)
    assert beside == pytest.approx([-1, 1, 0], abs=1e-6)


def test_missing_values_leave_the_group_statistics():
    rewards = [[0.0, 5.0], [1.0, 7.0], [3.0, 99.0], [0.0, -99.0]]
    present = [[True, True], [True, True], [True, False], [True, False]]
    z = scalars(rewards, [0] * 4, present_BK=present, eps=0).z_BK
    assert z[:, 1].tolist() == pytest.approx([-0.70711, 0.70711, 0, 0], abs=1e-5)
    # fewer than two present values say nothing
    present[1][1] = False
    assert scalars(rewards, [0] * 4, present_BK=present).z_BK[:, 1].tolist() == [0.0] * 4


def test_samples_without_any_reward_leave_the_batch_step():
    """24 pairs with the rewards 0 and 1, and 26 pairs of which nobody has a reward: 52 of 100.

    S is -+h with h = sqrt(1/2) in the 48 samples that have one, and its squares add up to 24. So
    the std is sqrt(24 / 47), and A is -+h sqrt(47 / 24) = -+0.98953. With the 52 others as S = 0
    the std was sqrt(24 / 99), and A was 1.45 times as large: -+1.43614.
    """
    rewards, groups = [[0.0], [1.0]] * 50, [i // 2 for i in range(100)]
    present = [[i < 48] for i in range(100)]
    A = scalars(rewards, groups, present_BK=present, eps=0).A_B
    assert A.tolist() == pytest.approx([-0.98953, 0.98953] * 24 + [0] * 52, abs=1e-5)
    # the only sample of a group that has a reward has S = 0 too, and counts: h sqrt(48 / 24)
    present[99] = [True]
    A = scalars(rewards, groups, present_BK=present, eps=0).A_B
    assert A[1].item() == pytest.approx(1)
    assert A[48:].tolist() == [0] * 52


@pytest.mark.parametrize("batch_norm", ["sample", "none"])
def test_samples_without_any_reward_leave_the_batch_step_of_a_variant(batch_norm):
    def shifted(z_BK, *_):
        return z_BK[:, 0] + 1

    rewards, groups, present = [[0.0], [1.0]] * 3, list("aabbcc"), [[True]] * 4 + [[False]] * 2
    options = {"combine": shifted, "batch_norm": batch_norm, "eps": 0}
    result = scalars(rewards, groups, present_BK=present, **options)
    assert not result.S_B[4:].any() and not result.A_B[4:].any()
    torch.testing.assert_close(result.A_B[:4], scalars(rewards[:4], groups[:4], **options).A_B)


@pytest.mark.parametrize("group_norm", ["per_reward", "summed"])
@pytest.mark.parametrize("batch_norm", ["sample", "token", "none"])
def test_a_batch_without_any_reward_has_no_advantage(group_norm, batch_norm):
    rewards, absent = [[0.0, 1.0], [1.0, 3.0]], [[False, False]] * 2
    options = {"group_norm": group_norm, "batch_norm": batch_norm, "token_count_B": [1, 2]}
    assert scalars(rewards, "aa", present_BK=absent, **options).A_B.tolist() == [0.0, 0.0]
    # a reward of weight 0 is none
    absent = [[True, False]] * 2
    weights = [0.0, 1.0]
    result = scalars(rewards, "aa", present_BK=absent, weights=weights, **options)
    assert result.A_B.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_the_batch_step_takes_no_mean_for_rounding_but_what_is(scale):
    """Whatever the unit of S."""
    S_B = torch.tensor([1.0, 2.0, 4.0, 0.0], dtype=torch.float64)

    def given(*_):
        return scale * S_B

    rewards, groups = [[0.0], [1.0], [0.0], [1.0]], [0, 0, 1, 1]
    A = scalars(rewards, groups, combine=given, **BARE).A_B
    torch.testing.assert_close(A, (S_B - 1.75) / S_B.std())
    means = []
    for seed in range(10):
        rewards, groups = random_batch(seed, n=40)
        rewards[8:12] = 0.3
        result = scalars(rewards, groups, weights=[scale] * 3, **BARE)
        means.append(result.S_B.mean().item())
        assert not result.A_B[8:12].any()
    assert any(means)


def test_an_S_that_is_constant_is_0_without_eps_and_beside_padding():
    def constant(*_):
        return torch.full((4,), 0.3, dtype=torch.float64)

    rewards, groups, padding = [[0.0], [1.0], [0.0], [1.0]], [0, 0, 1, 1], [True] * 3 + [False]
    for valid in (None, padding):
        result = scalars(rewards, groups, combine=constant, valid_B=valid, **BARE)
        assert not result.A_B.any()
    by_token = {"batch_norm": "token", "token_count_B": [3, 2, 1, 0]}
    assert not scalars(rewards, groups, combine=constant, **by_token, **BARE).A_B.any()
    assert not scalars([[1.0]], [0], **BARE).A_B.any()


def test_samples_without_tokens_are_no_constant_batch():
    """Step 3 goes over tokens; a sample without any still gets an advantage."""
    rewards, groups = [[0.0], [1.0], [5.0], [9.0]], [0, 0, 1, 1]
    counts = {"batch_norm": "token", "token_count_B": [4, 4, 0, 0], "eps": 0}
    # the tokens have S = -h and h: std^2 = 8 h^2 / 7
    expected = sqrt(7 / 8)
    A = scalars(rewards, groups, **counts).A_B.tolist()
    assert pytest.approx([-expected, expected] * 2) == A


def test_a_rejected_sample_counts_when_the_caller_says_what_is_padding():
    rewards, groups = [[0.0], [1.0], [0.0], [3.0]], [0, 0, 1, 1]
    mask = torch.tensor([[1], [1], [0], [1]])
    inferred = compute_gdpo_advantage(rewards, groups, mask)
    told = compute_gdpo_advantage(rewards, groups, mask, valid_B=[True] * 4)
    assert inferred[3].item() == 0.0  # left alone in its group
    assert told[3].item() > 0.8
    assert told[2].item() == 0.0  # its tokens are still rejected


# --- rounding ------------------------------------------------------------------------------------

# no eps hides what rounding leaves of rewards that cancel, and the batch step scales it up
BARE = {"eps": 0, "batch_eps": 0}


def opposed(a, scale=1.0):
    """Rewards a and 5 - scale a: their z are opposite, and scale a + the other is constant."""
    return np.stack([a, 5 - scale * a], axis=1)


@given(
    seed=st.integers(0, 2**31),
    G=st.sampled_from([2, 3, 4, 7, 16, 50]),
    low=st.sampled_from([0.0, 0.9, -40.0, 1e6]),
    spread=st.sampled_from([1.0, 1e-3]),
    decimals=st.sampled_from([1, 4, 17]),
    scale=st.sampled_from([1.0, 3.0, 0.01]),
    pairs=st.integers(1, 4),
)
def test_rewards_that_cancel_give_exactly_0(seed, G, low, spread, decimals, scale, pairs):
    a_BK = low + spread * np.random.default_rng(seed).random((8 * G, pairs)).round(decimals)
    rewards = np.concatenate([opposed(a, scale) for a in a_BK.T], axis=1)
    groups = np.arange(8 * G) % 8
    gdpo = scalars(rewards, groups, **BARE)
    assert gdpo.z_BK.abs().max() > 0.5 or decimals == 1
    assert not gdpo.S_B.any() and not gdpo.A_B.any()
    grpo = scalars(rewards, groups, weights=[scale, 1] * pairs, group_norm="summed", **BARE)
    assert not grpo.S_B.any() and not grpo.A_B.any()


@pytest.mark.parametrize("G", [2, 4, 16])
@pytest.mark.parametrize("group_norm", ["per_reward", "summed"])
def test_rewards_that_cancel_in_float32_give_exactly_0(G, group_norm):
    a = torch.rand(4096, generator=torch.Generator().manual_seed(0)).square()
    rewards = torch.stack([a, 1 - a], dim=1)
    assert rewards.double().sum(dim=1).std() > 1e-9  # the sum is not constant in float64
    result = scalars(rewards, np.arange(4096) // G, group_norm=group_norm, **BARE)
    assert not result.S_B.any() and not result.A_B.any()
    # as float64 the same numbers are taken at their word
    exact = scalars(rewards.double(), np.arange(4096) // G, group_norm=group_norm, **BARE)
    # but in pairs, z is the root of 1/2 whatever the two values are
    assert exact.A_B.abs().max() > 1 or (G == 2 and group_norm == "per_reward")


def test_numbers_of_python_are_float64():
    rewards = [[0.1, 0.9], [0.7, 0.3], [0.2, 0.8]]
    assert not scalars(rewards, [0] * 3, **BARE).S_B.any()
    nearly = [[0.0], [1.0], [1.0 + 1e-12]]
    assert scalars(nearly, [0] * 3).z_BK[1:, 0].diff().item() > 0


def test_a_sample_whose_rewards_cancel_is_0_beside_others():
    rewards = [[0.1, 0.4], [0.2, 0.3], [0.3, 0.1], [0.4, 0.2]]
    S = scalars(rewards, [0] * 4, **BARE).S_B.tolist()
    # z = -1.16, -.39, .39, 1.16: the second reward has the ranks 4, 3, 1, 2 of the first
    step = 0.1 / sqrt(0.05 / 3)
    assert S[:2] == [0.0, 0.0]
    assert S[2:] == pytest.approx([-step, step])


@given(
    seed=st.integers(0, 2**31),
    G=st.integers(2, 16),
    low=st.sampled_from([0.0, -3.0, 1e3]),
    group_norm=st.sampled_from(["per_reward", "summed"]),
)
def test_a_millionth_of_the_rewards_is_no_rounding(seed, G, low, group_norm):
    a = low + np.random.default_rng(seed).random(3 * G)
    weights, groups = [1.0, 1.0 - 1e-6], np.arange(3 * G) % 3
    options = {"group_norm": group_norm, "normalize_by_std": False, "batch_norm": "none"}
    of_one = scalars(a[:, None], groups, **options).S_B
    left = scalars(opposed(a), groups, weights=weights, **options).S_B
    torch.testing.assert_close(left, 1e-6 * of_one, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("low", "step", "dtype"),
    [(2000.3, 0.0005, torch.float32), (1e15, 1.0, torch.float64), (-1e15, 1.0, torch.float64)],
)
@pytest.mark.parametrize("beside", [[], [7.0]])
def test_a_reward_alone_is_never_taken_for_rounding(low, step, dtype, beside):
    rewards = torch.tensor([[low, *beside], [low + step, *beside]], dtype=dtype)
    assert rewards[0, 0] != rewards[1, 0]
    S = scalars(rewards, [0, 0], **BARE).S_B.tolist()
    assert pytest.approx([-sqrt(0.5), sqrt(0.5)]) == S


def test_a_reward_alone_is_the_same_in_float32_and_float64():
    # 8,000,000 to 8,000,003: z = -1.16, -.39, .39, 1.16 with std sqrt(5/3)
    rewards = 8e6 + torch.arange(4.0)[:, None]
    S = scalars(rewards, [0] * 4, eps=0, batch_norm="none").S_B.tolist()
    assert pytest.approx([x / sqrt(5 / 3) for x in (-1.5, -0.5, 0.5, 1.5)]) == S
    # whatever the values are; beside a reward that is constant, or that counts nothing
    for seed in range(20):
        rng = np.random.default_rng(seed)
        values = (10.0 ** rng.integers(0, 8) + rng.random((24, 1))).astype(np.float32)
        beside = [np.full_like(values, 0.3), rng.random((24, 1)).astype(np.float32)]
        rewards, groups = np.hstack([values, *beside]), np.arange(24) % 3
        for group_norm in ("per_reward", "summed"):
            options = {"weights": [1.0, 1.0, 0.0], "group_norm": group_norm, **BARE}
            A_B = scalars(rewards, groups, **options).A_B
            assert torch.equal(A_B, scalars(rewards.astype(float), groups, **options).A_B)


@pytest.mark.parametrize("combine", [None, lambda z_BK, *_: z_BK.sum(dim=1)])
def test_whole_numbers_are_exact_in_float32(combine):
    # z of the second is .87, -.87, -.87, .87: S of .48 is less than float32 could err by
    rewards = 8e6 * torch.tensor([[1.0, 0.0]]) + torch.tensor([[0, 1], [1, 0], [2, 0], [3, 1]])
    exact, S_B = (scalars(r, [0] * 4, combine=combine).S_B for r in (rewards.double(), rewards))
    assert torch.equal(S_B, exact) and exact[1:3].abs().min() > 0.4
    halves = rewards + torch.tensor([0.5, 0.0])  # which may stand for 8,000,000.3
    assert not scalars(halves, [0] * 4, combine=combine).S_B[2]


def test_rewards_of_weight_0_leave_no_rounding_in_a_variant():
    rewards = [[0.0, 1e15], [0.0, 1e15 + 1], [0.0, 1e15 + 2], [1.0, 1e15 + 3]]
    S = scalars(rewards, [0] * 4, weights=[1, 0], eps=0, combine=lambda z_BK, *_: z_BK[:, 0]).S_B
    assert S.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5])


# --- inputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        PARITY_GROUPS,
        np.array(PARITY_GROUPS),
        np.array(PARITY_GROUPS, dtype=object),
        torch.tensor([2**60] * 4 + [-1] * 4 + [7] * 4),
        list(np.repeat([5, 3, 4], 4)),
        [np.int64(5)] * 2 + [5] * 2 + [np.uint8(3)] * 4 + [4] * 4,
        np.array([np.int32(5)] * 2 + [5] * 2 + [3] * 4 + [4] * 4, dtype=object),
        list(np.array(PARITY_GROUPS)[:2]) + PARITY_GROUPS[2:],
        np.array([np.str_("a"), *PARITY_GROUPS[1:]], dtype=object),
    ],
)
def test_group_ids_of_any_kind(ids):
    expected = compute_gdpo_scalars(PARITY_REWARDS, [0] * 4 + [1] * 4 + [2] * 4)
    assert torch.equal(compute_gdpo_scalars(PARITY_REWARDS, ids).A_B, expected.A_B)


TENSORS = [torch.tensor(1), torch.tensor(1)]
OTHER_IDS = [[0.5, 0.5], [None, None], [1, "1"], [np.int64(1), np.str_("1")], [True, "a"]]
OTHER_IDS += [[True, False], [True, 1], np.array([True, False]), [np.True_, np.False_]]
OTHER_IDS += [torch.tensor([0.5, 0.5]), TENSORS, [("a",), ("b",)], [b"a", b"a"]]


@pytest.mark.parametrize("ids", OTHER_IDS)
def test_other_group_ids_are_refused(ids):
    got = sorted({type(i).__name__ for i in (ids.tolist() if hasattr(ids, "tolist") else ids)})
    message = f"group_ids: expected all integers or all strings, got {got}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        compute_gdpo_scalars([[1.0], [2.0]], ids)


def test_tokens_have_to_be_counted():
    with pytest.raises(ValueError, match="needs token_count_B"):
        compute_gdpo_scalars([[1.0], [2.0]], [0, 0], batch_norm="token")


@pytest.mark.parametrize("counts", [[[3], [5]], [3], 3, [3, 5, 7], torch.ones(2, 2)])
def test_token_counts_are_one_a_sample(counts):
    got = tuple(torch.as_tensor(counts).shape)
    message = re.escape(f"token_count_B: expected shape (2,), got {got}")
    with pytest.raises(ValueError, match=message):
        compute_gdpo_scalars([[1.0], [2.0]], [0, 0], batch_norm="token", token_count_B=counts)


@pytest.mark.parametrize("kind", [int, float, np.int8])
def test_masks_of_numbers(kind):
    present = [[True, i % 3 > 0] for i in range(12)]
    valid = [i != 5 for i in range(12)]
    expected = scalars(PARITY_REWARDS, PARITY_GROUPS, present_BK=present, valid_B=valid)
    numbers = {"present_BK": np.array(present, dtype=kind), "valid_B": [kind(v) for v in valid]}
    actual = scalars(PARITY_REWARDS, PARITY_GROUPS, **numbers)
    assert torch.equal(actual.z_BK, expected.z_BK) and torch.equal(actual.A_B, expected.A_B)


def test_sources_with_other_scales_under_one_name_count_alike():
    """As gsm8k's correctness, 0 or 1, beside ToolRL's, -3 or 3, and a format in both."""
    right, form = np.array([0.0, 1, 1, 0]), np.array([1.0, 1, 0, 0])
    rewards = np.stack([np.concatenate([right, 6 * right - 3]), np.tile(form, 2)], axis=1)
    groups = ["gsm8k"] * 4 + ["rlla"] * 4
    gdpo = per_sample(rewards, groups)
    np.testing.assert_allclose(gdpo[:4], gdpo[4:], atol=1e-3)
    # one number for both sources: where the scale is small, correctness counts a sixth
    grpo = per_sample(rewards / [[6.0, 1.0]], groups, **GRPO)
    assert grpo[2] < 0 < grpo[0]  # a right answer without the format is pushed down
    assert grpo[6] == pytest.approx(grpo[4], abs=1e-3)
