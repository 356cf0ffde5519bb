"""Which groups dynamic sampling keeps; `test_replay_buffer.py` asks verl's buffer."""

import numpy as np
import pytest

from verl_gdpo.algorithm.group_filter import FilterCounts, Groups, classify_groups
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("metric", [None, np.array([0.0, 1.0, 1.0, 1.0, np.nan])])
def test_a_group_that_is_only_padding_is_not_kept(place, metric):
    # "varies" has the rewards 0 and 1, "same" has 1 and 1; neither knows of the padding
    samples = [("varies", 0.0), ("varies", 1.0), ("same", 1.0), ("same", 1.0)]
    samples.insert(2 * place, ("padding", 0.0))
    groups = [group for group, _ in samples]
    rows = BatchRows.from_keys(
        [f"{group}_{row}_0" for row, group in enumerate(groups)],
        [{"right": right} for _, right in samples],
        sources=["s"] * 5,
        is_padding=[group == "padding" for group in groups],
    )
    metric_B = None if metric is None else np.insert(metric[:4], 2 * place, metric[4])
    kept = classify_groups(rows, groups, GdpoSettings(), metric_B).dropped
    assert kept == {"varies": None, "same": 1.0, "padding": 0.0}


def test_groups_that_are_dropped_whole_are_not_kept():
    """As of one look, after `on_error: drop` took all samples of them."""
    rows = BatchRows.from_keys(["u_0_0", "u_1_0"], [{"right": 0.0}] * 2, ["s"] * 2, [True, True])
    settings = GdpoSettings(keep_groups={"right": (0.0, 1.0)})
    groups = classify_groups(rows, ["u", "u"], settings, None)
    assert groups == Groups({"u": 0.0}, {"right": 0}, set())


@pytest.mark.parametrize(
    ("metric_B", "kept"),
    [
        ([np.nan, np.nan], None),  # no sample has one: GDPO's signal alone decides
        ([2.0, np.nan], 2.0),
        ([2.0, 2.0], 2.0),
        ([2.0, 3.0], None),
    ],
)
def test_the_metric_must_vary_where_a_sample_has_one(metric_B, kept):
    infos = [{"right": 0.0}, {"right": 1.0}]
    rows = BatchRows.from_keys(["u_0_0", "u_1_0"], infos, ["s"] * 2, [False] * 2)
    groups = classify_groups(rows, ["u", "u"], GdpoSettings(), np.array(metric_B))
    assert groups.dropped == {"u": kept}


def naive_mean(infos, name):
    values = [info[name] for info in infos if info.get(name) is not None]
    return sum(values) / len(values) if values else None


@pytest.mark.parametrize("limits", [(0.25, 0.75), (0.5, 0.5), (0.0, 0.25), (-1.0, 2.0)])
def test_groups_are_kept_by_the_mean_of_a_reward(limits):
    """Of 40 groups with None in some samples, against a loop; `other` gives each a gradient."""
    rng = np.random.default_rng(7)
    groups = {}
    for number in range(40):
        infos = []
        for session in range(4):
            right = float(rng.random() < number / 40)
            value = None if rng.random() < 0.2 or number % 10 == 9 else right
            infos.append({"right": value, "other": float(session)})
        groups[f"g{number}"] = infos
    keys = [f"{group}_{session}_0" for group in groups for session in range(4)]
    all_infos = [info for infos in groups.values() for info in infos]
    rows = BatchRows.from_keys(keys, all_infos, ["s"] * 160, [False] * 160)
    settings = GdpoSettings(keep_groups={"right": limits})
    result = classify_groups(rows, rows.uids, settings, None)
    low, high = limits
    outside = set()
    for group, infos in groups.items():
        mean = naive_mean(infos, "right")
        if mean is not None and not low <= mean <= high:
            outside.add(group)
    assert {group for group, value in result.dropped.items() if value is not None} == outside
    assert result.outside == {"right": len(outside)}
    assert result.seen == {"right"}


def test_a_group_needs_the_range_of_each_reward_and_a_gradient():
    values = {
        "both": [(0.0, 0.0), (1.0, 1.0)],
        "a_alone": [(0.0, 0.9), (1.0, 1.0)],
        "b_alone": [(0.9, 0.0), (1.0, 1.0)],
        "no_gradient": [(0.5, 0.5), (0.5, 0.5)],
    }
    keys = [f"{group}_{n}_0" for group in values for n in range(2)]
    infos = [{"a": a, "b": b} for pairs in values.values() for a, b in pairs]
    rows = BatchRows.from_keys(keys, infos, ["s"] * 8, [False] * 8)
    settings = GdpoSettings(keep_groups={"a": (0.2, 0.8), "b": (0.2, 0.8)})
    result = classify_groups(rows, rows.uids, settings, None)
    assert [group for group, value in result.dropped.items() if value is None] == ["both"]
    assert result.outside == {"a": 1, "b": 1}


def test_the_mean_is_that_of_values_before_their_condition():
    when = {"weight": 1.0, "when": {"reward": "right", "at_least": 1.0}}
    rewards = {"right": 1.0, "short": when}
    infos = [{"right": 0.0, "short": 1.0}, {"right": 1.0, "short": 1.0}]
    rows = BatchRows.from_keys(["u_0_0", "u_1_0"], infos, ["s"] * 2, [False] * 2)
    settings = GdpoSettings(rewards=rewards, keep_groups={"short": (1.0, 1.0)})
    assert classify_groups(rows, rows.uids, settings, None).dropped == {"u": None}


def test_the_ends_belong_to_the_range_also_after_rounding():
    """The mean of three times 0.1 is 0.10000000000000002."""
    infos = [{"a": 0.1, "b": float(n)} for n in range(3)]
    rows = BatchRows.from_keys([f"u_{n}_0" for n in range(3)], infos, ["s"] * 3, [False] * 3)
    for limits, kept in [((0.0, 0.1), True), ((0.1, 1.0), True), ((0.11, 1.0), False)]:
        settings = GdpoSettings(keep_groups={"a": limits})
        (value,) = classify_groups(rows, rows.uids, settings, None).dropped.values()
        assert (value is None) == kept


def test_rows_that_are_no_samples_count_nowhere():
    """A session of two rows counts by its last one, and padding not at all."""
    values = {"u_0_0": 9.0, "u_0_1": 0.0, "u_1_0": 1.0, "u_2_0": 9.0}
    rows = BatchRows.from_keys(
        list(values), [{"a": value} for value in values.values()], ["s"] * 4, [False] * 3 + [True]
    )
    settings = GdpoSettings(keep_groups={"a": (0.5, 0.5)})
    assert classify_groups(rows, rows.uids, settings, None).dropped == {"u": None}


def test_the_shares_of_the_groups_begin_anew_with_each_batch():
    counts = FilterCounts()
    counts.add(Groups({"u": None, "v": 0.5, "w": None, "x": 0.0}, {"a": 1}, {"a"}))
    counts.add(Groups({"y": 0.5}, {"a": 1}, set()))
    assert counts.metrics() == {"gdpo/filter_kept": 0.4, "gdpo/a/groups_outside": 0.4}
    assert counts.metrics() == {}
    counts.add(Groups({"u": None}, {"a": 0}, set()))
    assert counts.metrics() == {"gdpo/filter_kept": 1.0, "gdpo/a/groups_outside": 0.0}
