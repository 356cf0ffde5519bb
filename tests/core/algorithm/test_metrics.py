"""The gdpo/ metrics: small batches computed by hand, and laws that hold for all batches."""

import logging
import math
import re
from dataclasses import replace

import numpy as np
import oracle
import pytest
import torch
from drawn_batches import batches
from hypothesis import given
from hypothesis import strategies as st
from metrics_of_batch import EXACT, GROUPS, LENGTHS, REWARDS, matrix, of_batch
from repository import REPO

from verl_gdpo.algorithm import metrics
from verl_gdpo.algorithm.failed_samples import drop_failed
from verl_gdpo.algorithm.matrix import scalars_of
from verl_gdpo.algorithm.metrics import (
    MOST_SOURCES,
    advantages_without_eps,
    batch_metrics,
    contributions,
    correlation,
    groups_with_signal,
    rollout_metrics,
    scoring_metrics,
    settings_of_advantage,
    tied_pairs,
    why_mean_is_not_0,
)
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, ROLLOUT_KEY
from verl_gdpo.tasks.tool_rl.score import CallNotes

PAGE = REPO / "docs" / "metrics.md"


# --- one batch, all metrics ----------------------------------------------------------------------


def test_gdpo_by_hand():
    # z is -+1/sqrt(2) where a pair differs, so with h = sqrt(1/2)
    #   x: -h h | -h h | 0 0 | 0 0     y: h -h | -h h | 0 0 | -h h
    #   S:  0 0 | -2h 2h | 0 0 | -h h  with sum 0 and sum of squares 4h^2 * 2 + h^2 * 2 = 5
    assert of_batch(bounds={"x": (0, 1)}) == pytest.approx(
        {
            "gdpo/x/mean": 4 / 8,
            "gdpo/x/std": 0.5,
            "gdpo/x/min": 0,
            "gdpo/x/max": 1,
            "gdpo/x/varies": 2 / 4,  # a, b
            "gdpo/x/missing": 0,
            "gdpo/x/at_low": 4 / 8,
            "gdpo/x/at_high": 4 / 8,
            "gdpo/x/groups_all_high": 1 / 4,  # c
            "gdpo/x/groups_all_low": 1 / 4,  # d
            "gdpo/y/mean": 5 / 8,
            "gdpo/y/std": math.sqrt(15) / 8,  # of 5 ones in 8: sqrt(5/8 * 3/8)
            "gdpo/y/min": 0,
            "gdpo/y/max": 1,
            "gdpo/y/varies": 3 / 4,  # a, b, d
            "gdpo/y/missing": 0,
            "gdpo/y/groups_all_high": 1 / 4,  # c
            "gdpo/y/groups_all_low": 0,
            # they oppose each other in a, and agree as much in b
            "gdpo/x/correlation_with_y": 0,
            # b and d have a signal: 2 and 4 contributions of h^2
            "gdpo/x/energy": 2 / 6,
            "gdpo/y/energy": 4 / 6,
            # x.S = 2 * h * 2h = 2, and y.S = 2 + 1, of S.S = 5
            "gdpo/x/share": 2 / 5,
            "gdpo/y/share": 3 / 5,
            # A is S up to a scale; |x| = 1, |y| = sqrt(2)
            "gdpo/x/correlation": 2 / math.sqrt(5),
            "gdpo/y/correlation": 3 / math.sqrt(2 * 5),
            "gdpo/cancelled": 2 / 8,  # a; nothing contributes in c
            "gdpo/no_signal": 2 / 4,  # a, c
            # a, b and d are pairs with different rewards; both tie a
            "gdpo/tied_pairs_gdpo": 1 / 3,
            "gdpo/tied_pairs_grpo": 1 / 3,
            # squares 4 4 in b and 1 1 in d, where y alone varies: x is 0 in d, and y nowhere
            "gdpo/x/update_all_low": 2 / 10,
            "gdpo/y/update_all_low": 0,
            "gdpo/distinct_gdpo": 5,  # 0, +-2h, +-h
            "gdpo/distinct_grpo": 3,  # sums 1 1 | 0 2 | 2 2 | 0 1: 0, +-h
            "gdpo/batch_norm_mean": 0,
            "gdpo/batch_norm_std": math.sqrt(5 / 7),
            # deviations from the groups' means: 0 0 | -10 10 | 0 0 | -5 5, squares 250;
            # times S: 2h * 20 + h * 10 = 50h
            "gdpo/length_correlation": 50 * math.sqrt(0.5) / math.sqrt(250 * 5),
        },
        abs=1e-12,
    )


def test_grpo_by_hand():
    # sums 1 1 | 0 2 | 2 2 | 0 1, so S: 0 0 | -h h | 0 0 | -h h. Contributions:
    #   b, divided by sqrt(2): x -+.5/sqrt(2), y the same;   d, divided by h: y -+.5/h = -+h
    #   a, whose sum is constant: left out
    result = of_batch(replace(settings_of_advantage("grpo", EXACT), eps=0.0))
    energy_x = 2 * 0.125
    energy_y = energy_x + 2 * 0.5
    assert result["gdpo/x/energy"] == pytest.approx(energy_x / (energy_x + energy_y))
    # x.S = 2 * .5/sqrt(2) * h = .5, |S|^2 = 2
    assert result["gdpo/x/correlation"] == pytest.approx(0.5 / math.sqrt(energy_x * 2))
    assert result["gdpo/cancelled"] == 2 / 8
    assert result["gdpo/no_signal"] == 2 / 4
    assert (result["gdpo/distinct_gdpo"], result["gdpo/distinct_grpo"]) == (5, 3)
    assert not any("batch_norm" in name for name in result)


def test_estimators_that_ours_does_not_describe():
    assert settings_of_advantage("rloo", EXACT) is None
    everything = of_batch()
    of_rewards = of_batch(None)
    assert of_rewards == {name: everything[name] for name in of_rewards}
    assert {name.rsplit("/", 1)[1] for name in of_rewards} == {
        *("mean", "std", "min", "max", "varies", "missing", "correlation_with_y"),
        *("groups_all_high", "groups_all_low"),
    }


@pytest.mark.parametrize("batch_norm", ["sample", "token", "none"])
@pytest.mark.parametrize("group_norm", ["per_reward", "summed"])
def test_the_estimators_own_result_gives_the_same_metrics(monkeypatch, batch_norm, group_norm):
    gdpo = GdpoSettings(batch_norm=batch_norm, group_norm=group_norm)
    counted = np.array([True] * 7 + [False])  # the last row is padding
    ids, lengths, of_rewards = np.array(GROUPS), np.array(LENGTHS), matrix(REWARDS)
    arguments = of_rewards, counted, ids, lengths, gdpo, {}
    alone = batch_metrics(*arguments)
    scalars = scalars_of(of_rewards, counted, ids, gdpo, torch.from_numpy(lengths))
    monkeypatch.setattr(metrics, "scalars_of", None)  # is not called
    assert batch_metrics(*arguments, scalars=scalars) == alone
    assert batch_metrics(*arguments, scalars=scalars._replace(S_B=scalars.S_B + 1)) != alone


def test_padding_and_other_rows_of_a_session_change_nothing():
    result = of_batch(
        rewards=[*REWARDS, [9, 9], [5, -5]],
        groups=[*GROUPS, "pad", "a"],
        lengths=[*LENGTHS, 1, 999],
        counted=[True] * 8 + [False] * 2,
        bounds={"y": (0, 1)},
    )
    assert result == pytest.approx(of_batch(bounds={"y": (0, 1)}), abs=1e-12)


def test_missing_rewards():
    # x is left in the samples 0, 1 (group a), 4 (c, alone) and 6, 7 (d)
    present = [[row in (0, 1, 4, 6, 7), True] for row in range(8)]
    result = of_batch(present=present, bounds={"x": (0, 1)})
    assert result["gdpo/x/missing"] == 3 / 8
    assert result["gdpo/x/mean"] == 2 / 5
    assert result["gdpo/x/varies"] == 1 / 3  # a of a, c, d
    assert result["gdpo/x/at_high"] == 2 / 5
    # less the groups' means, x -.5 .5 | 0 | 0 0 and y .5 -.5 | 0 | -.5 .5
    assert result["gdpo/x/correlation_with_y"] == pytest.approx(-0.5 / math.sqrt(0.5 * 1))


def test_a_reward_that_no_sample_has():
    result = of_batch(present=[[False, True]] * 8, bounds={"x": (0, 1)})
    assert {name for name in result if "/x/" in name} == {
        *("gdpo/x/missing", "gdpo/x/energy", "gdpo/x/share")
    }
    assert result["gdpo/x/missing"] == 1
    assert result["gdpo/x/energy"] == 0


def test_two_tasks_in_a_batch():
    # x belongs to the groups a and b, y to c and d, u to all but for padding; weights 1
    #   x -h h | -h h        y -h h | 0 0        u 0 0 | 0 0 | 0 0 | 0 0
    rewards = [[0, 9, 4], [1, 9, 4], [0, 9, 4], [1, 9, 4]]
    rewards += [[9, 0, 2], [9, 1, 2], [9, 1, 2], [9, 1, 2], [9, 9, 9]]
    result = of_batch(
        rewards=rewards,
        present=[[True, False, True]] * 4 + [[False, True, True]] * 5,
        groups=[*GROUPS, "pad"],
        lengths=[*LENGTHS, 1],
        counted=[True] * 8 + [False],
        sources=["p/p"] * 4 + ["q"] * 5,
    )
    assert result["gdpo/x/missing"] == result["gdpo/y/missing"] == 4 / 8
    assert result["gdpo/x/varies"] == 1  # in each group that has it
    assert result["gdpo/y/varies"] == 1 / 2
    # nothing but x moves the advantage where x is
    assert result["gdpo/x/correlation"] == pytest.approx(1)
    assert result["gdpo/y/correlation"] == pytest.approx(1)
    by_source = {name: value for name, value in result.items() if name.endswith(("/p/p", "/q"))}
    assert by_source == {
        "gdpo/x/mean/p/p": 1 / 2,
        "gdpo/x/varies/p/p": 1,
        "gdpo/x/groups_all_high/p/p": 0,
        "gdpo/x/groups_all_low/p/p": 0,
        "gdpo/y/mean/q": 3 / 4,
        "gdpo/y/varies/q": 1 / 2,
        "gdpo/y/groups_all_high/q": 1 / 2,
        "gdpo/y/groups_all_low/q": 0,
        "gdpo/u/mean/p/p": 4,
        "gdpo/u/mean/q": 2,
        "gdpo/u/varies/p/p": 0,
        "gdpo/u/varies/q": 0,
        # 2 and 4 are the lowest and the highest value of the step
        "gdpo/u/groups_all_high/p/p": 1,
        "gdpo/u/groups_all_high/q": 0,
        "gdpo/u/groups_all_low/p/p": 0,
        "gdpo/u/groups_all_low/q": 1,
        "gdpo/no_signal/p/p": 0,
        "gdpo/no_signal/q": 1 / 2,
    }


def test_groups_of_one_keep_their_sources():
    result = of_batch(
        rewards=[[1], [2], [3]], groups=list("cab"), lengths=[1] * 3, sources=["p", "q", "q"]
    )
    assert result["gdpo/x/groups_all_low/p"] == 1 and result["gdpo/x/groups_all_high/p"] == 0
    assert result["gdpo/x/groups_all_low/q"] == 0 and result["gdpo/x/groups_all_high/q"] == 1 / 2


def test_many_sources_are_told_by_their_means_alone():
    for count, others in ((MOST_SOURCES, True), (MOST_SOURCES + 1, False)):
        rows = [[k % 2] for k in range(2 * count)]
        groups = [k // 2 for k in range(2 * count)]
        sources = [f"s{group}" for group in groups]
        result = of_batch(rewards=rows, groups=groups, lengths=[1] * len(rows), sources=sources)
        for what in ("x/varies", "x/groups_all_high", "no_signal"):
            assert (f"gdpo/{what}/s0" in result) == others
        assert result[f"gdpo/x/mean/s{count - 1}"] == 1 / 2


def test_groups_that_are_all_high_or_all_low():
    # a: 1 1, b: 0 0, c: 0 1; bounds say that 1 is not the highest value, and 0 not the lowest one
    rewards = [[1, 5], [1, 5], [0, 5], [0, 5], [0, 5], [1, 5]]
    observed = of_batch(rewards=rewards, groups=list("aabbcc"), lengths=[1] * 6)
    assert observed["gdpo/x/groups_all_high"] == observed["gdpo/x/groups_all_low"] == 1 / 3
    # nothing says whether 5 is high or low
    assert not {"gdpo/y/groups_all_high", "gdpo/y/groups_all_low"} & {*observed}
    bounds = {"x": (-1, 2), "y": (0, 5)}
    declared = of_batch(rewards=rewards, groups=list("aabbcc"), lengths=[1] * 6, bounds=bounds)
    assert declared["gdpo/x/groups_all_high"] == declared["gdpo/x/groups_all_low"] == 0
    assert declared["gdpo/y/groups_all_high"] == 1 and declared["gdpo/y/groups_all_low"] == 0


def test_without_any_signal_nothing_undefined_is_logged():
    result = of_batch(rewards=[[0.1, 0.3]] * 8)
    assert result["gdpo/no_signal"] == 1
    assert result["gdpo/cancelled"] == result["gdpo/batch_norm_std"] == 0
    assert result["gdpo/distinct_gdpo"] == result["gdpo/distinct_grpo"] == 1
    undefined = ("correlation", "energy", "share", "tied")
    assert not any(word in name for name in result for word in undefined)


def test_correlations_are_those_within_groups():
    """Hard prompts lower both rewards and lengthen answers; within each group it is otherwise."""
    rewards = [[0, 1], [1, 0], [10, 11], [11, 10]]
    lengths = [120, 100, 20, 5]
    result = of_batch(rewards=rewards, weights=[2.0, 1.0], groups=list("aabb"), lengths=lengths)
    assert np.corrcoef(np.array(rewards).T)[0, 1] > 0.97
    assert result["gdpo/x/correlation_with_y"] == pytest.approx(-1)
    # S is -h h | -h h, and lengths less their groups' means are 10 -10 | 7.5 -7.5
    expected = -(20 + 15) / math.sqrt(4 * (2 * 10**2 + 2 * 7.5**2))
    assert result["gdpo/length_correlation"] == pytest.approx(expected)
    assert abs(np.corrcoef([-1, 1, -1, 1], lengths)[0, 1]) < 0.2


def test_two_rewards_that_cancel_have_no_share_but_energy():
    # u is 1 - x, so S is z of y alone: 1.5 -.5 -.5 -.5; x is .8660 .8660 -.8660 -.8660
    rewards = [[1, 0, 1], [1, 0, 0], [0, 1, 0], [0, 1, 0]]
    result = of_batch(rewards=[[x, y, u] for x, u, y in rewards], groups=[0] * 4, lengths=[1] * 4)
    share = (1.5 * 0.75**0.5 - 0.5 * 0.75**0.5 + 2 * 0.5 * 0.75**0.5) / 3
    shares = [result[f"gdpo/{name}/share"] for name in "xyu"]
    assert shares == pytest.approx([share, 1, -share])
    assert [result[f"gdpo/{name}/energy"] for name in "xyu"] == pytest.approx([1 / 3] * 3)


def test_silent_groups_change_no_share_of_grpo():
    """A group with the sums 5, 5 has no gradient, however large its rewards are."""
    grpo = replace(settings_of_advantage("grpo", EXACT), eps=0.0)
    rewards, groups = [[0, 0], [0, 1], [0, 0], [2, 1]], list("aabb")
    alone = of_batch(grpo, rewards, groups, [1] * 4)
    silent = of_batch(grpo, [*rewards, [5, 0], [0, 5]], [*groups, "c", "c"], [1] * 6)
    for name in ("x/share", "y/share", "x/energy", "y/energy", "x/correlation"):
        assert silent[f"gdpo/{name}"] == pytest.approx(alone[f"gdpo/{name}"]), name
    assert alone["gdpo/x/share"] + alone["gdpo/y/share"] == pytest.approx(1)


def test_what_counts_as_a_tie():
    """Only pairs of one group in which a reward with a weight differs, or is there once."""
    values = np.array([[0.0, 0], [1, 0], [2, 9], [2, 0], [5, 0], [5, 1]])
    present = np.ones((6, 2), dtype=bool)
    group_B, A_B = np.array([0, 0, 0, 1, 1, 1]), np.array([0.0, 0, 1, 1, 1, 1])
    # (0, 1), (0, 2), (1, 2) and (3, 4), (3, 5): the second reward has no weight
    assert tied_pairs([A_B], values, present, np.array([1.0, 0]), group_B) == [3 / 5]
    shuffled = [3, 0, 5, 1, 4, 2]
    of_shuffled = (A_B[shuffled], values[shuffled], present, np.array([1.0, 0]), group_B[shuffled])
    assert tied_pairs([of_shuffled[0], np.arange(6.0)], *of_shuffled[1:]) == [3 / 5, 0]
    assert tied_pairs([A_B], values, present, np.array([0.5, 1]), group_B) == [4 / 6]
    absent = present.copy()
    absent[4, 0] = False
    assert tied_pairs([A_B], values * [[0, 0]], absent, np.array([1.0, 0]), group_B) == [1]
    assert tied_pairs([A_B], values * 0, present, np.array([1.0, 1]), group_B) == [None]


def test_a_group_has_a_signal_with_one_sample_of_it():
    c_BK = np.array([[1.0, -1], [1, 1], [1e-9, 0], [0, 0]])
    signal_G = groups_with_signal(c_BK.sum(axis=1), c_BK, np.array([0, 0, 1, 2]))
    assert signal_G.tolist() == [True, False, False]


def test_rewards_that_cancel_everywhere_leave_rounding_that_is_no_correlation():
    rewards = [[0.1, 0.9], [0.7, 0.3], [0.2, 0.8], [0.6, 0.4]]
    result = of_batch(GdpoSettings(), rewards, list("aabb"), [1, 2, 3, 4])
    assert result["gdpo/cancelled"] == result["gdpo/no_signal"] == 1
    assert not {"gdpo/x/correlation", "gdpo/length_correlation"} & {*result}
    assert result["gdpo/x/correlation_with_y"] == pytest.approx(-1)


def test_rewards_of_different_spread_cancel_too():
    # in a, eps=1e-4 leaves S of about 9e-5 of z that are -.7070 and .7071
    rewards = [[0, 10], [1, 0], [0, 7], [1, 7]]
    result = of_batch(GdpoSettings(), rewards, list("aabb"), [1] * 4)
    assert (result["gdpo/cancelled"], result["gdpo/no_signal"]) == (0.5, 0.5)


def test_a_float32_reward_is_at_its_bound():
    rewards = np.array([[0.7], [0.7], [0.2], [0.1]], dtype=np.float32)
    result = of_batch(EXACT, rewards, list("aabb"), [1] * 4, bounds={"x": (0.1, 0.7)})
    assert result["gdpo/x/at_high"] == 2 / 4
    assert result["gdpo/x/at_low"] == 1 / 4


# --- the number of distinct advantages -----------------------------------------------------------


def distinct(rewards, groups, weights=(1.0, 1.0)):
    m = matrix(rewards)
    group_B = np.unique(groups, return_inverse=True)[1]
    of_both = advantages_without_eps(m.values_BK, m.present_BK, np.array(weights), group_B)
    return tuple(len(np.unique(A_B)) for A_B in of_both)


@pytest.mark.parametrize(
    ("rewards", "groups", "weights", "expected"),
    [
        # sums 0 1 | 0 2: with eps=1e-6 GRPO's 6th decimals differ
        ([[0, 0], [0, 1], [0, 0], [1, 1]], "aabb", (1.0, 1.0), (4, 2)),
        ([[0, 0], [0, 1], [0, 0], [1, 1]], "aabb", (1e-9, 1e-9), (4, 2)),
        ([[0, 0], [0, 1], [0, 0], [1, 1]], "aabb", (1.0, 0.5), (4, 2)),
        # 0.1 + 0.2 is not 0.3 in floating point: the sums are constant but for that, then a reward
        ([[0.1, 0.2], [0.3, 0.0]], "aa", (1.0, 1.0), (1, 1)),
        ([[0.1 + 0.2, 0.0], [0.3, 0.0]], "aa", (1.0, 1.0), (1, 1)),
    ],
)
def test_neither_scale_nor_rounding_makes_an_advantage(rewards, groups, weights, expected):
    assert distinct(rewards, list(groups), weights) == expected


# --- the mean of the batch step ------------------------------------------------------------------


ONE_PAIR = {"rewards": [[0], [1]] * 3, "groups": list("aabbcc"), "lengths": [3] * 6}
ONE_PAIR |= {"present": [[True]] * 2 + [[False]] * 4}


@pytest.fixture
def warnings_of(caplog):
    metrics._warn_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="verl_gdpo.algorithm.metrics")
    yield caplog
    metrics._warn_once.cache_clear()


def test_token_weights_are_warned_of_once(warnings_of):
    by_token = replace(EXACT, batch_norm="token")
    result = of_batch(by_token)
    of_batch(by_token)
    # S times length: 2h * 20 + h * 10 = 50h, over 140 tokens
    assert result["gdpo/batch_norm_mean"] == pytest.approx(50 * math.sqrt(0.5) / 140)
    assert [record.getMessage() for record in warnings_of.records] == [
        "verl-gdpo: gdpo/batch_norm_mean is not about 0, because batch_norm=token counts samples "
        "by their tokens, and S depends on the length"
    ]


@pytest.mark.parametrize(
    ("options", "batch", "mean", "std", "warning"),
    [
        ({"batch_norm": "token"}, {"lengths": [7] * 8}, 0, None, None),
        # S -h h in the one pair that has rewards, of 3 tokens each: the std is 1, or sqrt(3 / 5)
        ({}, ONE_PAIR, 0, 1, None),
        ({"batch_norm": "token"}, ONE_PAIR, 0, math.sqrt(3 / 5), None),
        # sums 0 2 and 1 0, the last without a reward: S -h h h -h, and the mean of three is h / 3
        (
            {"group_norm": "summed"},
            {
                "rewards": [[0], [2], [1], [9]],
                "groups": list("aabb"),
                "lengths": [3] * 4,
                "present": [[True], [True], [True], [False]],
            },
            math.sqrt(0.5) / 3,
            None,
            "because group_norm=summed counts samples without any reward",
        ),
        (
            {},
            {
                "rewards": [[1e15], [1e15 + 1], [1e15 + 1]],
                "groups": list("aaa"),
                "lengths": [1] * 3,
            },
            None,
            None,
            "float64 cannot resolve it",
        ),
    ],
)
def test_the_mean_and_the_std_of_the_batch(warnings_of, options, batch, mean, std, warning):
    result = of_batch(replace(EXACT, **options), **batch)
    if mean is not None:
        assert result["gdpo/batch_norm_mean"] == pytest.approx(mean, abs=1e-12)
    if std is not None:
        assert result["gdpo/batch_norm_std"] == pytest.approx(std)
    messages = [record.getMessage() for record in warnings_of.records]
    assert len(messages) == (warning is not None) and (warning or "") in "".join(messages)


def test_a_sum_that_is_not_the_weighted_one():
    c_BK = np.array([[1.0, 0.5], [-1.0, -0.5]])
    assert why_mean_is_not_0(c_BK.sum(axis=1), c_BK, None) is None
    # the minimum of both, as of a variant
    assert "gdpo.combine" in why_mean_is_not_0(np.array([0.5, -1.0]), c_BK, None)


# --- laws ----------------------------------------------------------------------------------------

VALUES = st.one_of(st.sampled_from([0.0, 1.0, 0.5, -3.0, 0.1 + 0.2, 0.3]), st.floats(-1e6, 1e6))


SETTINGS = st.builds(
    GdpoSettings,
    group_norm=st.sampled_from(["per_reward", "summed"]),
    batch_norm=st.sampled_from(["sample", "token", "none"]),
    normalize_by_std=st.booleans(),
    eps=st.sampled_from([1e-8, 1e-6, 1e-4]),
)
BATCHES = batches(VALUES, st.floats(-5, 5))
SHARES = ("missing", "varies", "at_low", "at_high", "energy", "cancelled", "no_signal")


@given(BATCHES, SETTINGS)
def test_no_nan_and_shares_are_shares(batch, gdpo):
    del batch["valid"]
    result = of_batch(gdpo, bounds={"x": (-1.0, 1.0)}, **batch)
    assert all(type(value) is float and math.isfinite(value) for value in result.values())
    for name, value in result.items():
        what = name.rsplit("/", 1)[1]
        if what.startswith("groups_all") or what in SHARES:
            assert 0 <= value <= 1, name
        if "correlation" in what:
            assert -1 <= value <= 1, name
    energies = [value for name, value in result.items() if name.endswith("/energy")]
    if energies:
        assert sum(energies) == pytest.approx(1)


@given(BATCHES, SETTINGS)
def test_contributions_add_up(batch, settings):
    gdpo = replace(settings, batch_norm="none", eps=1e-4)
    rewards = matrix(batch["rewards"], batch["weights"], batch["present"])
    group_B = np.unique(batch["groups"], return_inverse=True)[1]
    scalars = scalars_of(rewards, np.ones(len(group_B), bool), group_B, gdpo)
    c_BK = contributions(
        scalars.z_BK.numpy(),
        scalars.S_B.numpy(),
        rewards.values_BK,
        np.array(batch["weights"]),
        group_B,
        gdpo,
    )
    expected = oracle.gdpo(
        batch["rewards"],
        batch["groups"],
        weights=batch["weights"],
        present=batch["present"],
        group_norm=gdpo.group_norm,
        normalize_by_std=gdpo.normalize_by_std,
        batch_norm="none",
    )
    # rounding of terms as large as these; ours counts a spread of 1e-16 as rounding too, and the
    # oracle divides it by eps
    tolerance = 1e-11 * max(1.0, np.abs(c_BK).max(), np.abs(rewards.values_BK).max() * 1e4)
    assert c_BK.sum(axis=1) == pytest.approx(expected, abs=tolerance)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=9), st.floats(1e-3, 1e3))
def test_correlation_is_numpys(pairs, scale):
    x, y = np.array(pairs).T
    result = correlation(x, y)
    assert (result is None) == (np.ptp(x) == 0 or np.ptp(y) == 0)
    if np.ptp(x) > 1e-3 and np.ptp(y) > 1e-3:
        assert result == pytest.approx(np.corrcoef(x, y)[0, 1], abs=1e-6)
        assert correlation(-scale * x, y) == pytest.approx(-result, abs=1e-6)


# --- the page ------------------------------------------------------------------------------------


def of_scoring():
    """Two programs, two responses with calls, a row that is padding, and one without notes."""
    programs = [{"stopped": 1.0, "seconds_waited": 3.0}, {"stopped": 0.0, "seconds_waited": 0.5}]
    calls = [CallNotes("no_call").numbers(), CallNotes().numbers()]
    infos = [{NOTES_KEY: note, "a": 1.0} for note in (*programs, programs[0], *calls)]
    keys = [f"u_{n}_0" for n in range(6)]
    padding = [False, False, True, False, False, False]
    rows = BatchRows.from_keys(keys, [*infos, {"a": 1.0}], ["x"] * 6, padding)
    return scoring_metrics(drop_failed(rows, 2))


def of_rollouts(rollouts, lengths, keys=None):
    """The metrics of rows that took (tokens, seconds), or nothing that is known."""
    infos = []
    for rollout in rollouts:
        info = {"a": 1.0}
        if rollout is not None:
            info[ROLLOUT_KEY] = dict(
                zip(("generated_tokens", "tool_seconds"), rollout, strict=True)
            )
        infos.append(info)
    keys = keys or [f"u_{n}_0" for n in range(len(rollouts))]
    padding = [key.startswith("pad") for key in keys]
    rows = BatchRows.from_keys(keys, infos, ["x"] * len(keys), padding)
    return rollout_metrics(rows, np.array(lengths))


def test_what_the_rollouts_of_agents_took():
    """A session of two rows counts by its last one; padding and what nobody knows do not."""
    keys = ["u_0_0", "u_0_1", "u_1_0", "u_2_0", "pad_0_0"]
    rollouts = [(99, 99.0), (4, 1.0), (2, 0.0), None, (99, 99.0)]
    assert of_rollouts(rollouts, [99, 6, 2, 5, 99], keys) == {
        "gdpo/rollout/generated_tokens/mean": 3.0,
        "gdpo/rollout/tool_seconds/mean": 0.5,
        "gdpo/rollout/tool_seconds/max": 1.0,
    }
    # Without a tool they would say nothing new.
    assert of_rollouts([(4, 0.0), (2, 0.0)], [4, 2]) == {}
    assert of_rollouts([None, None], [4, 2]) == {}


def test_what_scorers_note():
    """The notes of each task are means over its own samples."""
    assert of_scoring() == {
        "gdpo/scoring/stopped": 0.5,
        "gdpo/scoring/seconds_waited": 1.75,
        "gdpo/scoring/no_call": 0.5,
        "gdpo/scoring/call_not_closed": 0.0,
        "gdpo/scoring/call_malformed": 0.0,
        "gdpo/scoring/call_incomplete": 0.0,
    }
    assert scoring_metrics(BatchRows.from_keys(["u_0_0"], [{"a": 1.0}], ["x"], [False])) == {}


def test_the_page_explains_each_metric_and_no_other():
    cells = re.findall(r"^\| (`gdpo/[^|]+`) \|", PAGE.read_text(), re.M)
    explained = set(re.findall(r"`(gdpo/[^`]+)`", " ".join(cells)))
    logged = of_batch(bounds={"x": (0, 1), "y": (0, 1)}, sources=["p"] * 8) | of_scoring()
    logged |= of_rollouts([(1, 1.0)], [2])
    generic = {re.sub("/[xy]/", "/<reward>/", name).replace("_y", "_<other>") for name in logged}
    generic = {re.sub("/p$", "/<data source>", name) for name in generic}
    assert explained == generic
