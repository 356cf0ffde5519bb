"""The groups that `algorithm.filter_groups` keeps, tested with verl's own replay buffer."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transfer_queue as tq
from replay_buffers import made_buffer
from stand_in import stand_in
from tensordict.tensorclass import NonTensorData, NonTensorStack

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import AGENT_SCORE_KEY, ERROR_KEY, RewardError
from verl_gdpo.hooks import replay_buffer
from verl_gdpo.hooks.extend import record_of
from verl_gdpo.hooks.replay_buffer import fetch_rows, select_prompts
from verl_gdpo.hooks.rollout_guard import RolloutError, RolloutGuard


@pytest.fixture
def queue(monkeypatch):
    """A TransferQueue in memory, {key: fields}, that counts how often a row is read."""
    rows, reads = {}, Counter()

    def kv_batch_get(keys, partition_id, select_fields):
        assert partition_id in ("train", "val")
        reads.update(keys)
        return {name: [rows[key][name] for key in keys] for name in select_fields}

    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    rows["reads"] = reads
    return rows


def buffer(metric="reward"):
    return made_buffer(refill_fn=lambda count: count, filter_groups_metric=metric)


def put(queue, buffer, groups, partition="train"):
    """Finished groups {uid: rewards, one row a session}; a key `uid_session_index` may be given."""
    for uid, rewards in groups.items():
        buffer.finished_keys[partition].add(uid)
        for session, values in enumerate(rewards):
            info = dict(zip("abc", map(float, values), strict=False))
            score = sum(values)
            key = f"{uid}_{session}_0"
            buffer.partitions[partition][key] = {}
            queue[key] = {
                "extra_fields": {"reward_extra_info": {**info, "score": score}},
                "data_source": "d",
                "rm_scores": torch.tensor([0.0, score]),
            }


def filtered(queue, groups, settings=None, metric="reward"):
    """A buffer that holds `groups` and filters by the settings."""
    made = buffer(metric)
    record_of(made).filter_by(settings or GdpoSettings(), metric)
    put(queue, made, groups)
    return made


GROUPS = {
    "tied": [(0, 0, 1), (0, 0, 1), (0, 1, 0), (1, 0, 0)],
    "opposed": [(0, 1, 0), (1, 0, 0), (0, 1, 0), (1, 0, 0)],
    "constant": [(0.1, 0.1, 0.1)] * 4,
    "ordinary": [(0, 0, 0), (0, 0, 1), (0, 0, 1), (1, 1, 1)],
}


@pytest.mark.parametrize("group_norm", ["per_reward", "summed"])
@pytest.mark.parametrize("batch_norm", ["sample", "token", "none"])
def test_gdpo_keeps_what_gives_a_gradient(queue, group_norm, batch_norm):
    settings = GdpoSettings(group_norm=group_norm, batch_norm=batch_norm)
    filtering = filtered(queue, GROUPS, settings)
    # rewards that cancel in part cancel in their raw sum too, so "summed" drops equal sums
    dropped = {"opposed", "constant"} | ({"tied"} if group_norm == "summed" else set())
    # under the mean score of the group, by which verl counts them: 1, 0.3, and 1
    counts = Counter({1.0: len(dropped) - 1, 0.3: 1})
    assert filtering._dapo_filtered_keys("train") == (dropped, counts)
    assert filtering._dapo_filtered_keys("train") == (dropped, counts)
    assert set(queue["reads"].values()) == {1}


# b varies, but only in rows in which a is too low for it to count
WHEN = {"a": 0.0, "b": {"weight": 1.0, "when": {"reward": "a", "at_least": 1}}}
CONDITIONED = {"u": [(0, 3), (0, 5)], "w": [(1, 3), (1, 5)], "v": [(1, 0), (0, 5)]}


@pytest.mark.parametrize(
    ("gdpo", "groups", "dropped"),
    [
        # opposed: the soft minimum is below 0 in every row
        ({"combine": {"name": "rvpo", "k": 1.0}}, GROUPS, {"constant"}),
        # tied: every row is in conflict
        ({"combine": {"name": "gd2po", "tau": 1.0}}, GROUPS, {"tied", "opposed", "constant"}),
        # as GRPO
        ({"combine": "dvao"}, GROUPS, {"tied", "opposed", "constant"}),
        # the batch decides what cancels, so a varying reward is enough
        ({"combine": "dara"}, GROUPS, {"constant"}),
        ({"combine": "sa_mrpo"}, GROUPS, {"constant"}),
        # a reward of weight 0 gives no gradient
        ({"combine": "dara", "rewards": {"a": 1.0, "b": 0.0}}, {"u": [(1, 0), (1, 1)]}, {"u"}),
        # z is -+ .8660 s / (s + eps), s = .577 and 3.12: eps leaves 1.2e-4, which is no gradient
        ({}, {"u": [(1, -3), (0, 2.4), (1, -3), (0, 2.4)]}, {"u"}),
        ({"rewards": WHEN}, CONDITIONED, {"u", "v"}),
        # 1 a + 2 b is 2 in each row, but z_b = -z_a and S = z_a - 2 z_a
        ({"rewards": {"a": 1.0, "b": 2.0}}, {"u": [(0, 1), (2, 0), (0, 1), (2, 0)]}, set()),
    ],
)
def test_the_settings_decide(queue, gdpo, groups, dropped):
    filtering = filtered(queue, groups, read_settings({"gdpo": gdpo}))
    assert filtering._dapo_filtered_keys("train")[0] == dropped


def test_other_estimators_keep_verls_rule(queue):
    filtering = buffer("score")  # verl 0.9.0 and its main do not know "reward"
    put(queue, filtering, GROUPS)
    dropped, _ = filtering._dapo_filtered_keys("train")
    assert dropped == {"tied", "opposed", "constant"}


def test_the_weights_of_the_step_decide(queue):
    rewards = {"a": {"weight": {1: 1.0, 2: 0.0}}, "b": 1.0}
    settings = read_settings({"gdpo": {"rewards": rewards}})
    filtering = filtered(queue, {"u": [(0, 1), (1, 1)]}, settings)
    assert filtering._terminal_eviction_reasons(1, "train")[1] == set()
    filtering._dapo_classification_cache.clear()
    assert filtering._terminal_eviction_reasons(2, "train")[1] == {"u"}


# a is whether the answer is right, b its length
WRONG_AND_RIGHT = {
    "wrong": [(0, 3), (0, 5)],
    "both": [(0, 3), (1, 5)],
    "right": [(1, 3), (1, 5)],
    "same": [(1, 3), (1, 3)],
    "opposed": [(1, 0), (0, 1)],
}


def infos(queue, uid):
    return [
        row["extra_fields"]["reward_extra_info"]
        for key, row in queue.items()
        if key.startswith(uid)
    ]


@pytest.mark.parametrize(
    ("metric", "dropped"),
    [
        *((name, Counter({4.0: 1, 1.0: 1})) for name in ("reward", "score", "seq_reward")),
        # under the mean of a in the group
        ("a", Counter({0.0: 1, 1.0: 2, 0.5: 1})),
    ],
)
def test_a_named_metric_must_vary_beside_the_signal(queue, metric, dropped):
    uids, counts = filtered(queue, WRONG_AND_RIGHT, None, metric)._dapo_filtered_keys("train")
    assert counts == dropped
    assert uids == {"same", "opposed"} | ({"wrong", "right"} if metric == "a" else set())


def test_a_metric_may_be_missing(queue, caplog):
    """None, or no such name: of another task, whose groups are not dropped for that."""
    groups = {"other": [(0, 3), (0, 5)], **WRONG_AND_RIGHT}
    filtering = filtered(queue, groups, read_settings({"gdpo": {"rewards": {"b": 1.0}}}), "acc")
    for uid in WRONG_AND_RIGHT:
        for info in infos(queue, uid):
            info["acc"] = info["a"]
    infos(queue, "both")[0]["acc"] = None
    infos(queue, "right")[0]["acc"] = infos(queue, "right")[1]["acc"] = None
    assert filtering._dapo_filtered_keys("train")[0] == {"wrong", "both", "same"}
    assert sum("other_0_0 has no value of it" in line for line in caplog.messages) == 1
    assert record_of(filtering).metric.metrics() == {"gdpo/filter_metric_missing": 5 / 12}
    assert record_of(filtering).metric.metrics() == {}


def test_a_metric_that_is_no_number_is_refused(queue):
    filtering = filtered(queue, {"u": [(0, 3), (0, 5)]}, metric="acc")
    infos(queue, "u")[1]["acc"] = "yes"
    with pytest.raises(RewardError, match=r"u_1_0: .*metric=acc is 'yes'; expected a finite num"):
        filtering._dapo_filtered_keys("train")


# {uid: the mean of a}
OF_MEANS = {
    "none": [(0, 3), (0, 5), (0, 7), (0, 9)],
    "one": [(1, 3), (0, 5), (0, 7), (0, 9)],
    "three": [(1, 3), (1, 5), (1, 7), (0, 9)],
    "all": [(1, 3), (1, 5), (1, 7), (1, 9)],
    "same": [(0, 3), (0, 3), (1, 3), (1, 3)],
}


@pytest.mark.parametrize(
    ("limits", "metric", "dropped"),
    [
        ([0.25, 0.75], "reward", {"none", "all"}),
        ([0.5, 1.0], "reward", {"none", "one"}),
        ([0.0, 1.0], "reward", set()),
        # What verl's filter asks for comes on top: the value varies.
        ([0.0, 1.0], "a", {"none", "all"}),
        ([0.5, 1.0], "a", {"none", "one", "all"}),
        ([0.0, 1.0], "b", {"same"}),
    ],
)
def test_groups_are_kept_by_a_mean_beside_verls_metric(queue, limits, metric, dropped):
    settings = read_settings({"gdpo": {"keep_groups": {"a": limits}}})
    filtering = filtered(queue, OF_MEANS, settings, metric)
    assert filtering._dapo_filtered_keys("train")[0] == dropped
    metrics = record_of(filtering).counts.metrics()
    assert metrics["gdpo/filter_kept"] == (5 - len(dropped)) / 5
    low, high = limits
    outside = [mean for mean in (0.0, 0.25, 0.75, 1.0, 0.5) if not low <= mean <= high]
    assert metrics["gdpo/a/groups_outside"] == len(outside) / 5


def test_groups_without_the_value_to_keep_by(queue):
    """None is left out of the mean; a group of another task has no value at all."""
    settings = read_settings({"gdpo": {"keep_groups": {"a": [0.5, 1.0]}}})
    filtering = filtered(queue, {"other": [(0, 3), (0, 5)], **OF_MEANS}, settings)
    for info in infos(queue, "other"):
        info["a"] = None
        info["score"] = info["b"]
    # 1, 0, None, None
    for info in infos(queue, "one")[2:]:
        info["a"] = None
        info["score"] = info["b"]
    assert filtering._dapo_filtered_keys("train")[0] == {"none"}


def test_a_name_to_keep_by_that_no_sample_has_ends_the_run(queue, monkeypatch):
    monkeypatch.setattr(replay_buffer.RolloutGuard, "check", Mock())
    settings = read_settings({"gdpo": {"keep_groups": {"rihgt": [0.5, 1.0]}}})
    filtering = filtered(queue, OF_MEANS, settings)
    assert filtering._dapo_filtered_keys("train")[0] == set()
    rows = fetch_rows(["one_0_0"], "train", [{}], {})
    with pytest.raises(RewardError, match=r"keep_groups.rihgt: no sample had a value of it, .*'a'"):
        record_of(filtering).counts.check_seen(settings, rows)


def test_a_sampler_of_the_users_cannot_keep_groups():
    settings = read_settings({"gdpo": {"keep_groups": {"a": [0.5, 1.0]}}})
    with pytest.raises(ValueError, match=r"keep_groups=.*: this replay buffer filters no groups"):
        record_of(buffer(None)).filter_by(settings, None)


def test_without_filtering_and_in_validation_nothing_is_read(queue):
    filtering = filtered(queue, GROUPS, metric=None)
    assert filtering._dapo_filtered_keys("train") == (set(), Counter())
    validating = filtered(queue, {})
    put(queue, validating, GROUPS, partition="val")
    assert validating._dapo_filtered_keys("val") == (set(), Counter())
    assert not queue["reads"]


@pytest.mark.parametrize("settings", [None, GdpoSettings()])
def test_a_failed_sample_stops_before_it_is_dropped(queue, settings):
    filtering = buffer()
    if settings is not None:
        record_of(filtering).filter_by(settings, "reward")
    put(queue, filtering, {"u": [(1,), (1,)]})
    queue["u_1_0"]["extra_fields"]["reward_extra_info"] = {ERROR_KEY: "no"}
    with pytest.raises(RewardError, match="no"):
        filtering._dapo_filtered_keys("train")


# --- rows from TransferQueue, which returns three kinds of columns ------------------------------

KEYS = ["u_0_0", "u_1_0", "v_0_0", "pad_0_0"]
TAGS = [{"response_len": n, "is_padding": n == 1} for n in (4, 3, 2, 1)]
INFOS = [
    {"a": 1.0, "score": 1.0},
    {"a": None, "score": 0.0},
    {"a": 3.0, "b": 2.0},  # no `score`: a manager of verl
    {"a": 1.0, "score": 1.0},
]
OWN = [{**info, AGENT_SCORE_KEY: 5.0} if row == 0 else info for row, info in enumerate(INFOS)]
EXTRA = [{"reward_extra_info": info} for info in OWN]
SOURCES = ["x", "x", "y", "x"]


def stack(values):
    return NonTensorStack(*[NonTensorData(value) for value in values])


def objects(values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@pytest.fixture
def stored(monkeypatch):
    """TransferQueue in memory: the fields of `KEYS`, of which it gives what is asked for."""
    fields = {"extra_fields": EXTRA, "data_source": SOURCES}

    def kv_batch_get(keys, partition_id, select_fields):
        assert partition_id == "train"
        rows = [KEYS.index(key) for key in keys]
        kind = fields.get("kind", list)
        return {name: kind([fields[name][row] for row in rows]) for name in select_fields}

    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    return fields


@pytest.mark.parametrize("kind", [list, stack, objects])
def test_rows_in_the_order_of_the_keys(stored, kind):
    stored["kind"] = kind
    known = {}
    fetch_rows(KEYS[2:3], "train", TAGS[2:3], known)
    stored["data_source"] = ["x"] * 4  # what is known is not read again
    rows = fetch_rows(KEYS, "train", TAGS, known)
    assert list(known) == ["v_0_0", "u_0_0", "u_1_0", "pad_0_0"]
    assert [rows.extra_info(row) for row in range(4)] == INFOS
    assert list(rows.sources) == SOURCES
    assert rows.own_scores == {0: 5.0}
    assert rows.is_padding_B.tolist() == [False, False, False, True]
    assert rows.label(2) == "v_0_0"


def test_the_rows_of_a_step_are_taken_once(stored):
    record = record_of(made_buffer())
    batch = SimpleNamespace(keys=KEYS, partition_id="train", tags=TAGS)
    assert record.checked_rows(KEYS, "train", TAGS).step is None
    stored["data_source"] = ["new"] * 4
    first = record.take_rows(batch, 7)
    assert first.step == 7 and list(first.sources) == SOURCES  # as they were checked
    assert not record.known_rows
    assert list(record.take_rows(batch, 8).sources) == ["new"] * 4


@pytest.mark.parametrize("short", [["data_source"], ["extra_fields", "data_source"]])
def test_an_answer_of_other_rows_is_an_error(monkeypatch, short):
    def kv_batch_get(keys, partition_id, select_fields):
        fields = {"extra_fields": EXTRA, "data_source": SOURCES}
        return {name: values[: 3 if name in short else 4] for name, values in fields.items()}

    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        fetch_rows(KEYS, "train", TAGS, {})


def test_a_row_without_rewards_or_tag(stored):
    stored["extra_fields"] = [{}, {"reward_extra_info": None}, *EXTRA[2:]]
    rows = fetch_rows(KEYS, "train", [{}] * 4, {})
    assert [rows.extra_info(row) for row in range(2)] == [{}, {}]
    assert rows.own_scores == {}
    assert not rows.is_padding_B.any()


def test_verls_methods_get_what_they_were_called_with(queue):
    made, verls = buffer(), Mock()
    own = type(made)
    put(queue, made, {"u": [(1,), (2,)], "v": [(3,)]})
    stand_in(replay_buffer.clear_groups, verls, like=own._clear_groups)(made, "train", {"u"})
    verls.assert_called_with(made, "train", {"u"})
    materialize = stand_in(replay_buffer.materialize_batch, verls, like=own._materialize_batch)
    materialize(made, "train", ["v"], made.partitions["train"])
    verls.assert_called_with(made, "train", ["v"], {"v_0_0": {}})
    record_of(made).in_rounds = True
    made.running_keys["train"].add("w")
    sampleable = stand_in(replay_buffer.sampleable_keys, verls, like=own._sampleable_terminal_keys)
    assert sampleable(made, "train", {}) == set()
    sampleable(made, "val", {})
    verls.assert_called_with(made, "val", {})


@pytest.mark.parametrize("partition", ["train", "val"])
def test_a_batch_is_checked_and_its_metrics_are_added(queue, partition):
    made = filtered(queue, {}, metric="acc")
    put(queue, made, {"u": [(0, 3), (0, 5)]}, partition=partition)
    for info in infos(queue, "u"):
        info["acc"] = 1.0
    record = record_of(made)
    record.guard = Mock()
    batch = SimpleNamespace(keys=["u_0_0", "u_1_0"], partition_id=partition, tags=[{}, {}])
    record.metric.read(fetch_rows(batch.keys, partition, batch.tags, {}))
    record.has_filtered = True  # as of `filtered_keys`
    result = stand_in(replay_buffer.sample, lambda *_: (batch, {"verl's": 1}))(made, 2)
    missing = {"gdpo/filter_metric_missing": 0.0} if partition == "train" else {}
    assert result == (batch, {"verl's": 1, **missing})
    record.guard.end_batch.assert_called_once_with(partition)


@pytest.mark.parametrize(
    ("mode", "partition", "lost"),
    [
        ("sync", "train", {"none", "one"}),  # one rollout alone has no advantage
        ("sync", "val", {"none"}),
        ("colocate_async", "train", {"none", "one", "two"}),  # verl replaces them
        ("colocate_async", "val", {"none"}),
        (None, "train", {"none", "one"}),  # of a user's class
    ],
)
def test_what_is_lost_of_a_prompt_that_failed(mode, partition, lost):
    left = ["one_0_0", "one_0_1", "two_0_0", "two_1_0", "two_1_1", "whole_0_0"]
    made = SimpleNamespace(
        failure_keys={partition: {"none", "one", "two"}},
        finished_keys={partition: {"whole"}},
        partitions={partition: {key: {} for key in left}},
        pending_keys={partition: {"a"}},
        running_keys={partition: {"b", "c"}},
        **({"trainer_mode": mode} if mode else {}),
    )
    prompts = replay_buffer._prompts_of(made, partition)
    assert prompts.lost == lost and prompts.failed == {"none", "one", "two"}
    assert prompts.ended == {"none", "one", "two", "whole"} and prompts.under_way == 3


@pytest.mark.parametrize("partition", ["train", "val"])
def test_nothing_is_left_of_all_selected_prompts(partition):
    buffer, uids = made_buffer(RolloutGuard(dict, tolerated=0)), ["b", "a"]
    selected = uids, {"a_0_0": {}, "c_0_0": {}}
    own = type(buffer)
    select = stand_in(select_prompts, lambda *_: selected, like=own._select_prompt_uids)
    assert select(buffer, partition, {*uids}, 2) is selected
    del selected[1]["a_0_0"]
    message = rf"^all 2 prompts of the partition '{partition}' failed, .* for uid=a'"
    with pytest.raises(RolloutError, match=message):
        select(buffer, partition, {*uids}, 2)
