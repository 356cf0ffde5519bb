"""The reward matrix of a batch: which rewards, their order and values, and what stops the run."""

import math
from dataclasses import replace

import numpy as np
import pytest

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.metrics import small_ranges
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import ERROR_KEY, RewardError


def rows_like(*infos, keys=None, sources=None, padding=()):
    keys = keys or [f"u_{row}_0" for row in range(len(infos))]
    is_padding = [row in padding for row in range(len(infos))]
    return BatchRows.from_keys(keys, infos, sources or ["d"] * len(infos), is_padding)


def matrix(rows, rewards=None, bounds=None):
    """`rewards` as in the configuration."""
    return RewardMatrix.of(rows, GdpoSettings(rewards=rewards, bounds=bounds or {}))


@pytest.mark.parametrize(("low", "high"), [(-3.0, 3.0), (0.0, 1.0), (100.0, 104.0)])
def test_a_value_may_leave_its_bounds_by_a_millionth_of_their_distance(low, high):
    slack, bounds = 1e-6 * (high - low), {"a": (low, high)}
    for value in (low - slack, low, high, high + slack):
        rows = rows_like({"a": value}, {"a": None})
        assert matrix(rows, bounds=bounds).values_BK[0, 0] == value
    for value in (low - 1.01 * slack, high + 1.01 * slack, low - 1, math.inf):
        rows = rows_like({"a": low}, {"a": value})
        message = "outside its bounds" if value < math.inf else "expected a finite number"
        with pytest.raises(RewardError, match=f"^u_1_0: reward 'a' is .*{message}"):
            matrix(rows, bounds=bounds)


def test_columns_follow_the_order_of_rows_and_of_the_configuration():
    of_u2 = {"format": 1.0, "correctness": -3.0, "score": -2.0}
    of_u1 = {"correctness": 2.0, "format": 0.0, "score": 2.0}
    rows = rows_like(of_u2, of_u1, keys=["u2_0_0", "u1_0_0"])
    assert list(matrix(rows).weights) == ["format", "correctness"]
    assert matrix(rows).values_BK.tolist() == [[1.0, -3.0], [0.0, 2.0]]
    named = matrix(rows, {"correctness": 0.5})
    assert named.weights == {"correctness": 0.5}
    assert named.values_BK.tolist() == [[-3.0], [2.0]]


def test_padding_is_not_counted_and_its_copied_rewards_are_not_read():
    copied = {"a": float("nan"), ERROR_KEY: "copied"}
    rows = rows_like({"a": 1.0}, {"a": 3.0}, copied, padding=[2])
    rows.raise_on_error()
    result = matrix(rows)
    assert result.values_BK.tolist() == [[1.0], [3.0], [0.0]]
    assert result.present_BK.tolist() == [[True], [True], [False]]


@pytest.mark.parametrize(
    ("otherwise", "values"), [("zero", [0.9, 0.0, 0.0]), ("missing", [0.9, None, None])]
)
def test_a_condition_gates_raw_values(otherwise, values):
    rewards = {
        # reads the raw b, although b itself is gated to 0 in the second row
        "a": {"weight": 2.0, "when": {"reward": "b", "at_least": 1.0}, "otherwise": otherwise},
        "b": {"when": {"reward": "c", "at_least": 0.0}},
    }
    infos = [
        {"a": 0.9, "b": 1.0, "c": -1.0},  # b fails its own condition, and still opens a
        {"a": 0.7, "b": 0.5, "c": 1.0},
        {"a": 0.5, "b": 0.0, "c": 1.0},
    ]
    terms = GdpoSettings(rewards=rewards).terms
    gated = [terms.gate(info) for info in infos]
    assert [row["a"] for row in gated] == values
    assert [row["b"] for row in gated] == [0.0, 0.5, 0.0]
    # 2 * 0.9 + 0, and a adds nothing to the others, be it 0 or missing
    assert [terms.score(info) for info in infos] == [1.8, 0.5, 0.0]

    result = matrix(rows_like(*infos), rewards)
    assert result.values_BK.tolist() == [[0.9, 0.0], [0.0, 0.5], [0.0, 0.0]]
    assert result.present_BK[:, 0].tolist() == [value is not None for value in values]


SAMPLE = {"a": 1.0, "score": 2.0}


@pytest.mark.parametrize(
    ("infos", "weights", "message"),
    [
        ([SAMPLE, {"a": math.nan}], {"a": 1}, "u_1_0: reward 'a' is nan; expected a finite number"),
        ([SAMPLE, {"a": "1"}], None, "u_1_0: reward 'a' is '1'; expected .* Return a float"),
        ([SAMPLE, {"a": [1, 2]}], None, "u_1_0: reward 'a' is a list"),
        ([SAMPLE, {"b": 1.0}], {"a": 1}, r"u_1_0: no reward 'a'; the scorer returned \['b'\]"),
        ([SAMPLE, {"a": 1.0, "b": 1.0}], None, "u_1_0 has the rewards .* Return the same names"),
        (
            [SAMPLE, {"score": 2.0}],
            None,
            r"u_1_0 has the rewards \[\], but u_0_0 of the same data source 'd' has \['a'\]",
        ),
        ([SAMPLE], {"aa": 1}, "reward 'aa' is configured.*did you mean 'a'"),
        ([{"why": "text", "score": None}], None, "^u_0_0: the scorer returned no named reward"),
    ],
)
def test_what_is_no_reward_names_the_row(infos, weights, message):
    with pytest.raises(RewardError, match=message):
        matrix(rows_like(*infos), weights)


def test_a_batch_of_padding_alone():
    with pytest.raises(RewardError, match="only padding"):
        matrix(rows_like({"a": 1.0}, padding=[0]))


def test_weights_are_those_of_the_step():
    rows = replace(rows_like({"a": 1.0, "b": 2.0}), step=4)
    assert matrix(rows, {"a": {"weight": {0: 1, 10: 0}}, "b": 3}).weights == {"a": 0.6, "b": 3.0}


def test_none_is_missing():
    rows = rows_like({"a": 1.0, "b": 0.0, "score": 1.0}, {"a": 3.0, "b": None, "score": 3.0})
    for rewards in (None, {"a": 1.0, "b": 1.0}):
        result = matrix(rows, rewards)
        assert result.values_BK.tolist() == [[1.0, 0.0], [3.0, 0.0]]
        assert result.present_BK.tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("otherwise", ["zero", "missing"])
def test_a_missing_value_meets_no_condition_and_stays_missing_whatever_its_own(otherwise):
    rewards = {"a": {"when": {"reward": "b", "at_least": 1}, "otherwise": otherwise}}
    terms = GdpoSettings(rewards=rewards).terms
    assert terms.gate({"a": 1.0, "b": None}) == {"a": 0.0 if otherwise == "zero" else None}
    assert terms.gate({"a": None, "b": None}) == {"a": None}
    result = matrix(rows_like({"a": None, "b": 0.0}, {"a": 2.0, "b": 1.0}), rewards)
    assert result.present_BK.tolist() == [[False], [True]]


def test_data_sources_with_different_rewards():
    of_x, of_y = {"a": 1.0, "score": 1.0}, {"b": 2.0, "c": 3.0, "score": 5.0}
    rows = rows_like(of_x, of_y, {"a": 4.0, "score": 4.0}, sources=["x", "y", "x"])
    result = matrix(rows)
    assert list(result.weights) == ["a", "b", "c"]
    assert result.values_BK.tolist() == [[1.0, 0.0, 0.0], [0.0, 2.0, 3.0], [4.0, 0.0, 0.0]]
    assert result.present_BK.tolist() == (result.values_BK != 0).tolist()
    # a name that is configured is not left out in silence
    with pytest.raises(RewardError, match=r"u_1_0: reward 'a' is configured"):
        matrix(rows, {"a": 1.0})


# --- what counts when no reward is named ---------------------------------------------------------


def test_text_and_lists_are_no_rewards():
    rows = rows_like(
        {"acc": True, "pred": "7", "steps": ["a"], "score": 1.0},
        {"acc": np.float32(0), "pred": None, "steps": [], "score": 0.0},
        {"acc": None, "steps": []},  # what is not there need not be, unless it is a reward
    )
    assert matrix(rows).weights == {"acc": 1.0}
    assert matrix(rows).values_BK[:, 0].tolist() == [1.0, 0.0, 0.0]
    assert matrix(rows).present_BK[:, 0].tolist() == [True, True, False]


def test_a_reward_that_no_sample_has_counts_where_there_is_no_other():
    assert matrix(rows_like({"a": None, "b": "x"}, {"a": None, "b": "y"})).weights == {"a": 1.0}
    assert matrix(rows_like({"a": None, "b": 1.0}, {"a": None, "b": 2.0})).weights == {"b": 1.0}


@pytest.mark.parametrize(
    ("score", "ok"), [(3.0, True), (3.0 + 1e-6, True), (None, True), (2.5, False), (-3.0, False)]
)
def test_a_score_that_is_not_the_sum_is_refused(score, ok):
    rows = rows_like({"a": 0.0, "b": None, "score": 0.0}, {"a": 1.0, "b": 2.0, "score": score})
    assert matrix(rows, {"a": 1.0}).weights == {"a": 1.0}  # named: `score` is of no interest
    if ok:
        assert matrix(rows).weights == {"a": 1.0, "b": 1.0}
        return
    with pytest.raises(RewardError, match=r"u_1_0: .*not the sum of .*rewards=\{a: 1.0, b: 1.0\}"):
        matrix(rows)


def test_a_score_that_no_float_can_hold_names_its_row():
    rows = rows_like({"a": 0.0, "score": 0.0}, {"a": 1.0, "score": 10**400})
    with pytest.raises(RewardError, match=r"^u_1_0: the scorer returned score=inf, which is not"):
        matrix(rows)


@pytest.mark.parametrize(("large", "is_small"), [(9.5, False), (10.0, True), (10.5, True)])
def test_a_range_is_small_from_a_tenth_on(large, is_small):
    settings = GdpoSettings()
    rewards = matrix(rows_like({"a": 0.0, "b": 0.0}, {"a": 1.0, "b": large}))
    lines = small_ranges(rewards, settings)
    assert [line.split(":")[0] for line in lines] == ["a"] * is_small


def test_a_reward_without_weight_or_value_has_no_small_range():
    rewards = {"a": {"weight": 0.0}, "b": {"weight": 0.0}}
    rows = rows_like({"a": 1.0, "b": None}, {"a": 2.0, "b": None})
    settings = GdpoSettings(rewards=rewards)
    of_rows = RewardMatrix.of(rows, settings)
    assert of_rows.ranges(settings) == {"a": 1.0, "b": 0.0}
    assert small_ranges(of_rows, settings) == []
