"""Rollouts that fail stop the run; tests/on_ray/test_dead_actors.py has actors that die."""

import time
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import transfer_queue as tq
from replay_buffers import made_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.values import ERROR_KEY, RewardError
from verl_gdpo.hooks import replay_buffer, rollout_guard
from verl_gdpo.hooks.extend import record_of
from verl_gdpo.hooks.rollout_guard import (
    ANSWER_SECONDS,
    Prompts,
    RolloutError,
    RolloutGuard,
)


def test_an_actor_that_cannot_be_reached_yet_is_asked_again(monkeypatch):
    """Ray knows some seconds after the death of a node that its actors are dead."""
    unavailable, died = (
        ray.exceptions.ActorUnavailableError("not now", None),
        ray.exceptions.ActorDiedError(),
    )
    answers = [unavailable, unavailable, died]
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(rollout_guard, "time", clock)
    monkeypatch.setattr(ray, "wait", lambda questions, **_: (questions, []))

    def get(question):
        raise question

    monkeypatch.setattr(ray, "get", get)
    ready = SimpleNamespace(remote=lambda: answers.pop(0))
    guard = RolloutGuard(
        lambda: {"reward worker 1": SimpleNamespace(__ray_ready__=ready)}, tolerated=0
    )
    with pytest.raises(RolloutError, match="reward worker 1 died"):
        guard.raise_if_node_died()
    assert answers == []


def prompts(kept=(), lost=(), under_way=0, partly=()):
    failed = {*lost, *partly}
    return Prompts({*kept} | failed, failed, {*lost}, under_way)


def numbered(count, first=0):
    return {f"u{number:04}" for number in range(first, first + count)}


def test_a_prompt_is_counted_once_however_often_it_is_seen():
    guard = RolloutGuard(dict, tolerated=40)
    for _ in range(50):
        guard.check({"val": prompts(lost=numbered(32)), "train": prompts(lost=numbered(40))})
    guard.check({"val": prompts(lost=numbered(32) | {"v"}, under_way=1)})  # it may be kept
    with pytest.raises(RolloutError, match=r"33 of the last 33 prompts .*'val'.* for uid=v'"):
        guard.check({"val": prompts(lost=numbered(32) | {"v"})})


def test_a_large_batch_of_training_does_not_let_a_validation_fail():
    most = prompts(numbered(20, 380), lost=numbered(380))
    guard = RolloutGuard(dict, tolerated=1023)
    guard.check({"train": most})
    with pytest.raises(RolloutError, match="380 of the last 400 prompts of the partition 'val'"):
        guard.check({"val": most})


def test_a_batch_is_judged_as_a_whole_and_only_an_excess_of_lost_prompts_is_carried_on():
    guard = RolloutGuard(dict, tolerated=0)
    guard.check({"val": prompts(kept=numbered(360))})
    guard.check({"val": prompts(numbered(360), numbered(40, 360))})  # those that fail end last
    guard.end_batch("val")
    guard.check({"val": prompts(lost=numbered(40), under_way=360)})  # and here first
    guard.check({"val": prompts(numbered(360, 40), numbered(40))})
    guard.end_batch("val")
    # 3 of 4 are lost in each batch: the excess is 2, 4, ..., 32, 34
    for batch in range(16):
        guard.check({"val": prompts({f"k{batch}"}, {f"{i}l{batch}" for i in range(3)})})
        guard.end_batch("val")
    with pytest.raises(RolloutError, match="51 of the last 68 prompts"):
        guard.check({"val": prompts({"k"}, {"l0", "l1", "l2"})})


@pytest.mark.parametrize("lost_first", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 64])
@pytest.mark.parametrize(("share", "ends"), [(0.04, False), (0.3, False), (0.6, True), (1, True)])
def test_more_than_half_of_the_prompts_have_to_be_lost(share, ends, batch, lost_first):
    def run():
        for first in range(0, 2000, batch):
            uids = sorted(numbered(batch, first))
            lost = {uid for uid in uids if rng.random() < share}
            in_turn = sorted(uids, key=lambda uid: (uid in lost) != lost_first)
            for ended in (in_turn[: batch // 3], in_turn):
                kept = {*ended} - lost
                guard.check({"train": prompts(kept, {*ended} & lost, batch - len(ended))})
            guard.end_batch("train")

    for seed in range(5):
        rng, guard = np.random.default_rng(seed), RolloutGuard(dict, tolerated=batch - 1)
        with pytest.raises(RolloutError) if ends else nullcontext():
            run()


def test_an_actor_is_asked_after_each_failure_also_if_something_is_left(monkeypatch):
    asked = []
    guard = RolloutGuard(dict, tolerated=0)
    monkeypatch.setattr(guard, "raise_if_dead", asked.append)
    for now in (prompts({"a"}), prompts({"a"}, partly={"b"}), prompts({"a"}, partly={"b"})):
        guard.check({"train": now})
    assert asked == [0, ANSWER_SECONDS, 0]


# --- in verl's own replay buffers ----------------------------------------------------------------


@pytest.fixture
def queue(monkeypatch):
    """The tags in TransferQueue, with the partition and the reward manager's `info` of a row."""
    tags = {}

    def kv_list():
        partitions = {}
        for key, tag in tags.items():
            partitions.setdefault(tag.get("partition", "train"), {})[key] = dict(tag)
        return partitions

    def kv_batch_get(keys, partition_id, select_fields):
        infos = [{"reward_extra_info": {"score": 0.0, **tags[key].get("info", {})}} for key in keys]
        return {"extra_fields": infos, "data_source": ["d"] * len(keys)}

    monkeypatch.setattr(tq, "kv_list", kv_list)
    monkeypatch.setattr(tq, "kv_batch_get", kv_batch_get)
    monkeypatch.setattr(tq, "kv_clear", lambda keys, partition_id: [tags.pop(key) for key in keys])
    return tags


def buffer_of(verls, mode, tolerated, refill=None, **more):
    sizes = {"poll_interval": 0.0, "train_batch_size": 6, "gen_batch_size": 1}
    guard = RolloutGuard(dict, tolerated=tolerated)
    return made_buffer(guard, verls, mode, refill_fn=refill, **sizes, **more)


def prompt(queue, uid, status, partition="train"):
    tag = {"is_prompt": True, "global_steps": 1, "status": status, "partition": partition}
    queue[uid] = tag


def test_async_does_not_replace_prompts_for_ever(queue):
    sent = []

    def refill(count):
        for _ in range(count):
            sent.append(f"u{len(sent)}")
            prompt(queue, sent[-1], "failure")
            queue.update({f"{sent[-1]}_{session}_0": {} for session in range(2)})  # not used

    refill(4)
    with pytest.raises(RolloutError, match="36 of the last 36 prompts"):
        buffer_of(ReplayBufferAsync, "colocate_async", 4, refill).sample(1, "train", 4)
    assert len(sent) == 36


def test_an_error_is_read_before_its_group_is_dropped(queue):
    """A sync trainer sends out more than it needs when it filters."""
    for uid in "tu":
        prompt(queue, uid, "failure")
    queue.update(t_0_0={}, t_1_0={}, u_0_0={"info": {ERROR_KEY: "no such city"}})
    buffer = buffer_of(ReplayBuffer, "sync", 9, filter_groups_metric="score", refill=print)
    with pytest.raises(RewardError, match="no such city"):
        buffer.sample(1, "train", 1)


@pytest.mark.parametrize(
    ("verls", "mode"), [(ReplayBuffer, "sync"), (ReplayBufferAsync, "colocate_async")]
)
def test_a_batch_is_in_the_order_in_which_its_prompts_were_sent_out(queue, verls, mode):
    uids = [f"u{number}" for number in range(20, 0, -1)]
    for uid in uids:
        prompt(queue, uid, "finished")
    for uid in sorted(uids):  # as they arrived
        queue.update({f"{uid}_{row}": {} for row in ("10_0", "2_1", "2_0")})
    batch, _ = buffer_of(verls, mode, 0).sample(1, "train", 12)
    expected = [f"{uid}_{row}" for uid in uids[:12] for row in ("2_0", "2_1", "10_0")]
    assert batch.keys == expected


def test_a_sampler_of_the_user_gets_what_verl_gives_it(queue):
    class Newest(ReplayBuffer):
        def _select_prompt_uids(self, partition_id, sampleable_keys, batch_size):
            chosen = max(sampleable_keys - {"u3"})
            return [chosen], dict(self.partitions[partition_id]), {}

    for uid in ("u1", "u2", "u3"):
        prompt(queue, uid, "finished")
        queue[f"{uid}_0_0"] = {}
    assert buffer_of(Newest, "sync", 0).sample(1, "train", 1)[0].keys == ["u2_0_0"]


def test_the_metric_of_filter_groups_must_be_known(queue):
    for uid in ("u1", "u2"):
        prompt(queue, uid, "finished")
        queue.update({f"{uid}_{i}_0": {"info": {"a": i, "b": None}} for i in range(2)})

    def sample(metric):
        made = buffer_of(ReplayBuffer, "sync", 9, print, filter_groups_metric=metric)
        settings = read_settings({"gdpo": {"rewards": {"a": 1}}})
        record_of(made).filter_by(settings, metric)
        return made.sample(1, "train", 1)

    saved = dict(queue)
    with pytest.raises(
        RewardError, match=r"metric=acc: the scorer returned \['score', 'a', 'b'\]\."
    ):
        sample("acc")
    queue.update({key: dict(tag) for key, tag in saved.items()})
    with pytest.raises(RewardError, match=r"metric=b: .*'b'\], this one always None"):
        sample("b")
    queue.update({key: dict(tag) for key, tag in saved.items()})
    batch, metrics = sample("a")
    assert batch.keys == ["u1_0_0", "u1_1_0"]
    assert metrics["gdpo/filter_metric_missing"] == 0


def test_filtering_in_rounds_does_not_depend_on_time(queue, monkeypatch):
    """Prompts arrive one at each look, and every third has no signal."""
    sent = []

    def refill(count):
        for _ in range(count):
            sent.append(f"u{len(sent)}")
            prompt(queue, sent[-1], "running")

    def kv_list():
        answer = {"train": {key: dict(tag) for key, tag in queue.items()}}
        running = [uid for uid in sent if queue.get(uid, {}).get("status") == "running"]
        for uid in running[:1]:
            prompt(queue, uid, "finished")
            queue[f"{uid}_0_0"] = {}
        return answer

    def no_signal(self, partition_id):
        dropped = {uid for uid in self.finished_keys[partition_id] if int(uid[1:]) % 3 == 0}
        return dropped, Counter()

    monkeypatch.setattr(tq, "kv_list", kv_list)
    monkeypatch.setattr(ReplayBuffer, "_dapo_filtered_keys", no_signal)
    monkeypatch.setattr(replay_buffer, "_classify_finished", lambda *_: None)
    buffer = buffer_of(ReplayBuffer, "sync", 0, refill, filter_groups_metric="score")
    record_of(buffer).in_rounds = True
    refill(6)
    batch, _ = buffer.sample(1, "train", 6)
    # two of u0 to u5 are dropped and twice as many sent, u6 to u9: with u7 and u8 there are 6
    assert batch.keys == [f"u{number}_0_0" for number in (1, 2, 4, 5, 7, 8)]
    assert len(sent) == 10
