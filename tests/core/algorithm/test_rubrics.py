"""Criteria that differ from prompt to prompt: the matrix, its metrics, and what division does."""

import json
from dataclasses import replace

import numpy as np
import oracle
import pytest

from verl_gdpo.algorithm import zero
from verl_gdpo.algorithm.equation import compute_gdpo_scalars
from verl_gdpo.algorithm.group_filter import classify_groups
from verl_gdpo.algorithm.matrix import RewardMatrix, scalars_of
from verl_gdpo.algorithm.metrics import batch_metrics
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.rubrics import check_rubrics, criteria_of
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import RUBRIC_KEY, RewardError, as_json

KEY = f"{RUBRIC_KEY}q"


def test_ties_and_signals_are_those_of_criteria():
    """Samples of one sum are one to GRPO; opposite criteria leave only what eps does."""
    pairs = [
        {"a": 1.0, "b": 0.0, "c": 0.0},
        {"a": 0.0, "b": 1.0, "c": 0.0},
        {"a": 0, "b": 0, "c": 1},
    ]
    samples = [*pairs, {"a": 0.0, "b": 0.0, "c": 0.0}]
    infos = [{"q": None, KEY: criteria_of(of, {"a": 1, "b": 1, "c": 1})} for of in samples]
    infos[2][KEY]["c"][0] = 2.0
    infos += [
        {"q": None, KEY: criteria_of({"a": n, "b": 2 * n}, {"a": 1, "b": -1})} for n in (0, 1)
    ]
    keys, groups = [f"{u}_{n}_0" for u, n in zip("uuuuvv", range(6), strict=True)], [*"uuuuvv"]
    rows, settings = BatchRows.from_keys(keys, infos, ["d"] * 6, [False] * 6), GdpoSettings()
    rewards = RewardMatrix.of(rows, settings)
    metrics = batch_metrics(rewards, rows.counted_B, groups, np.ones(6, int), settings, {})
    # of 7 pairs, GRPO gives a and b one advantage; GDPO those of a, b and c, and that of v
    assert metrics["gdpo/tied_pairs_grpo"] == pytest.approx(1 / 7)
    assert metrics["gdpo/tied_pairs_gdpo"] == pytest.approx(4 / 7)
    assert metrics["gdpo/no_signal"] == 0.5
    assert classify_groups(rows, groups, settings, None).dropped == {"u": None, "v": -0.25}
    # The mean to keep a group by is that of the weighted sums: 1/3, 1/3, 2/3 and 0.
    for low, is_kept in ((1 / 3, True), (0.34, False)):
        keeping = GdpoSettings(keep_groups={"q": (low, 1.0)})
        kept = classify_groups(rows, groups, keeping, None)
        assert (kept.dropped["u"] is None) == is_kept
        assert kept.outside == {"q": 1 if is_kept else 2}


def test_weights_of_rows_are_checked_and_have_no_variants():
    with pytest.raises(ValueError, match="combine needs the same weights for all samples"):
        compute_gdpo_scalars([[1.0]], ["u"], weights=[[1.0]], combine=lambda *_: None)
    with pytest.raises(ValueError, match="weights: expected 1 finite"):
        compute_gdpo_scalars([[1.0]], ["u"], weights=[[1.0], [1.0]])


def test_what_rounding_leaves_of_criteria_that_cancel_is_0():
    """The same values with the signs of a rubric's weights, beside a group of other weights."""
    rewards, weights = (
        [[0.1, 0.3], [0.7, 0.9], [0.1, 0.3], [0.7, 0.9]],
        [[1.0, -1.0]] * 2 + [[1.0, 0.0]] * 2,
    )
    S_B = compute_gdpo_scalars(rewards, [*"uuvv"], weights=weights, batch_norm="none").S_B
    assert S_B[:2].tolist() == [0, 0] and S_B[2] < -0.7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero, "EPS64", 0.0)
        S_B = compute_gdpo_scalars(rewards, [*"uuvv"], weights=weights, batch_norm="none").S_B
        assert S_B[:2].any()  # so the numbers do leave something


@pytest.mark.parametrize(
    ("values", "weights", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, r"a rubric returned {'a': 1.0}, and the row has the weights {'b'"),
        ({"a": 1.0}, {}, "the row has the weights {}"),
        ({}, None, "a rubric returned {}"),
        (1.0, {"a": 1.0}, "a rubric returned 1.0"),
        (1.0, None, "a rubric returned 1.0"),
        ({"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 0.0}, "of which one is not 0"),
        ({"a": "yes"}, None, "criterion 'a' is 'yes'; expected a finite number"),
        ({"a": 1.0}, {"a": "2"}, "criterion 'a' is '2'; expected a finite number"),
        ({"a": 1.0}, "[]", "the row has the weights {}"),
    ],
)
def test_what_is_no_rubric_is_refused(values, weights, message):
    with pytest.raises(ValueError, match=message):
        criteria_of(values, weights)


def test_weights_may_be_json_or_have_the_gaps_of_parquet():
    expected = {"a": [1.0, 2.0], "b": [None, 1.0]}
    for weights in ({"a": 2, "b": 1, "of another prompt": None}, json.dumps({"a": 2, "b": 1})):
        assert criteria_of({"a": True, "b": None}, weights) == expected


def test_a_long_rubric_is_dumped_whole():
    criteria = criteria_of({f"{n} {'x' * 200}": 1.0 for n in range(100)}, None)
    assert as_json(criteria, KEY) is criteria
    assert isinstance(as_json(["x" * 20_000]), str)


@pytest.mark.parametrize("other", [{"a": 1, "b": 2}, {"a": 1}, {"a": 1, "c": 1}])
def test_samples_of_a_prompt_have_the_same_criteria_and_weights(other):
    def rows(*keys):
        infos = [{"q": 1.0, KEY: criteria_of(dict.fromkeys(of, 1), of)} for of in (same, other)]
        infos.append({"q": None})
        return BatchRows.from_keys([*keys, "u_7_0"], infos, [""] * 3, [False] * 3)

    same = {"a": 1, "b": 1}
    check_rubrics(rows("u_0_0", "v_0_0"))
    check_rubrics(replace(rows("u_0_0", "u_1_0"), is_padding_B=np.array([False, True, False])))
    with pytest.raises(
        RewardError, match=r"u_1_0: rubric 'q' has the weights .*, expected .* of u_0_0"
    ):
        check_rubrics(rows("u_0_0", "u_1_0"))


@pytest.mark.parametrize(
    ("correlation", "share"),
    [
        (0.0, {"as_written": 0.83, "divided": 0.17}),
        (0.5, {"as_written": 0.95, "divided": 0.42}),
        (0.9, {"as_written": 0.96, "divided": 0.49}),
    ],
)
def test_the_share_of_prompts_with_ten_criteria_beside_those_with_two(correlation, share):
    """Of the squares of A; 1000 prompts of each kind, 8 samples, criteria are normal."""
    random, n = np.random.default_rng(0), 8
    own, common = random.normal(size=(16_000, 10)), random.normal(size=(16_000, 1))
    values = np.sqrt(1 - correlation) * own + np.sqrt(correlation) * common
    count = np.repeat([10, 2], 8000)[:, None]
    is_there, groups = np.arange(10) < count, np.repeat(np.arange(2000), n)
    for how, expected in share.items():
        weights = is_there / count if how == "divided" else is_there * 1.0
        A_B = compute_gdpo_scalars(values, groups, weights=weights).A_B.numpy()
        assert (A_B[:8000] ** 2).sum() / (A_B**2).sum() == pytest.approx(expected, abs=0.01)


def rows_of(infos):
    keys = [f"u_{n}_0" for n in range(len(infos))]
    return BatchRows.from_keys(keys, infos, ["d"] * len(infos), [False] * len(infos))


def info_of(first, second):
    return {"q": None, KEY: criteria_of({"a": first, "b": second}, {"a": 3, "b": 1})}


def test_a_sample_without_criteria_is_a_0_in_the_sum_of_rewards():
    """GRPO knows no missing reward. Its function failed, under `on_error: missing`."""
    rows = rows_of([info_of(1.0, 0.0), info_of(1.0, 1.0), info_of(0.0, 1.0), {"q": None}])
    settings = GdpoSettings(group_norm="summed", batch_norm="none")
    rewards = RewardMatrix.of(rows, settings)
    S_B = scalars_of(rewards, rows.counted_B, rows.uids, settings).S_B
    sums = [[0.75], [1.0], [0.25], [0.0]]
    options = {"group_norm": "summed", "batch_norm": "none"}
    assert S_B.tolist() == pytest.approx(oracle.gdpo(sums, [*"uuuu"], **options))
    # GDPO leaves it out.
    S_B = scalars_of(rewards, rows.counted_B, rows.uids, GdpoSettings(batch_norm="none")).S_B
    assert S_B[3] == 0 and S_B[:3].sum() == pytest.approx(0)


def test_a_value_without_criteria_is_not_lost():
    """An agent loop that sets scores itself cannot return criteria."""
    rows = rows_of([info_of(1.0, 0.0), info_of(1.0, 1.0), {"q": 0.5}])
    message = "u_2_0: 'q' is 0.5, without the criteria that a rubric has for each sample"
    with pytest.raises(RewardError, match=message):
        RewardMatrix.of(rows, GdpoSettings())
