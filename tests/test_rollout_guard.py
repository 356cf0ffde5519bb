"""Rollouts that fail or can no longer arrive stop the run; the tests use real Ray actors."""

import os
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl_run import ray_folder

from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.verl_hooks.replay_buffer import GdpoBuffer
from verl_gdpo.verl_hooks.rollout_guard import RolloutError, RolloutGuard, rollout_actors
from verl_gdpo.verl_hooks.v1_trainer import GdpoTrainer


@pytest.fixture(scope="module")
def cluster():
    with ray_folder() as folder:
        ray.init(
            "local",  # not a cluster that somebody else started on this machine
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@ray.remote(num_cpus=0)
class Worker:
    def pid(self):
        return os.getpid()

    def wait_for(self, path):
        while not os.path.exists(path):
            pass


def start(count):
    workers = [Worker.remote() for _ in range(count)]
    return workers, ray.get([worker.pid.remote() for worker in workers])


def trainer_of(reward, loops, servers):
    """What `rollout_actors` looks at in verl's trainers."""
    replicas = [
        SimpleNamespace(replica_rank=rank, servers=[server]) for rank, server in enumerate(servers)
    ]
    manager = SimpleNamespace(global_load_balancer="no actor", get_replicas=lambda: replicas)
    return SimpleNamespace(
        queue_actors={},
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=reward),
        agent_loop_manager=SimpleNamespace(agent_loop_workers=loops),
        llm_server_manager=manager,
    )


def test_a_dead_actor_is_named_without_a_failed_prompt(cluster):
    workers, pids = start(4)
    trainer = trainer_of(workers[:1], workers[1:2], workers[2:])
    assert rollout_actors(trainer) == {
        "reward worker 0": workers[0],
        "agent loop worker 0": workers[1],
        "rollout server 0, node 0 (llm)": workers[2],
        "rollout server 1, node 0 (llm)": workers[3],
    }
    guard = RolloutGuard(lambda: rollout_actors(trainer), tolerated=0)
    for _ in range(100):
        guard.check(set(), set())
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(RolloutError) as raised:
        while True:
            guard.check(set(), set())
    message = str(raised.value)
    assert message.startswith("rollout server 1, node 0 (llm) died. A start with trainer.resume")
    assert f"pid: {pids[3]}" in message
    assert "\n" not in message


def test_a_busy_actor_is_asked_once_and_is_not_dead(cluster, tmp_path):
    (worker,), _ = start(1)
    busy = worker.wait_for.remote(str(tmp_path / "go"))
    guard = RolloutGuard(lambda: {"a worker": worker}, tolerated=0)
    for _ in range(3):
        guard.check(set(), set())
    (question,) = guard._questions
    (tmp_path / "go").touch()
    assert ray.get([busy, question], timeout=30)[1]


def test_a_dead_actor_is_the_reason_why_prompts_fail(cluster):
    (worker,), (pid,) = start(1)
    guard = RolloutGuard(lambda: {"reward worker 0": worker}, tolerated=100)
    os.kill(pid, signal.SIGKILL)
    # at once, before anything is trained on what is left
    with pytest.raises(RolloutError, match="reward worker 0 died"):
        guard.check({"a"}, {"b"})


@pytest.mark.parametrize("is_ours", [True, False])
def test_an_actor_that_dies_while_verl_calls_it(cluster, is_ours):
    """verl lets Ray's error through, which says neither which actor died nor how to go on."""
    (worker,), (pid,) = start(1)

    class Trainer:
        def fit(self, agent_loop_manager):
            os.kill(pid, signal.SIGKILL)
            ray.get(agent_loop_manager.pid.remote())

    trainer = object.__new__(type("Ours", (GdpoTrainer, Trainer), {}))
    trainer.gdpo = GdpoSettings()
    actors = {"agent loop worker 0": worker} if is_ours else {}
    guard = RolloutGuard(lambda: actors, tolerated=0)
    trainer.replay_buffer = SimpleNamespace(guard=guard)
    error, said = (
        (RolloutError, r"agent loop worker 0 died\. A start with trainer\.resume_mode=auto")
        if is_ours
        else (ray.exceptions.ActorDiedError, "died unexpectedly")  # a worker that only verl has
    )
    with pytest.raises(error, match=said):
        trainer.fit(worker)


def test_prompts_may_fail_but_not_all():
    guard = RolloutGuard(dict, tolerated=2)
    guard.check({"a"}, {"b", "c"})
    guard.check({"a", "d"}, set())
    guard.check({"a", "d"}, {"e"})
    guard.check({"a"}, {"e", "f"})  # d was trained on
    with pytest.raises(RolloutError, match=r"3 prompts failed in a row.* for uid=e'"):
        guard.check({"a"}, {"g"})


# --- in verl's own replay buffers ----------------------------------------------------------------


@pytest.fixture
def queue(monkeypatch):
    """The tags in TransferQueue's partition "train"; rows have no fields."""
    tags = {}
    empty = {"extra_fields": [{}], "data_source": ["d"]}
    monkeypatch.setattr(tq, "kv_list", lambda: {"train": {k: dict(v) for k, v in tags.items()}})
    monkeypatch.setattr(
        tq,
        "kv_batch_get",
        lambda keys, partition_id, select_fields: {n: empty[n] * len(keys) for n in select_fields},
    )
    monkeypatch.setattr(tq, "kv_clear", lambda keys, partition_id: [tags.pop(key) for key in keys])
    return tags


def buffer_of(verls, mode, tolerated, refill=None, **more):
    buffer = type("Buffer", (GdpoBuffer, verls), {})(
        trainer_mode=mode,
        trainer_config=OmegaConf.create(),
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs=OmegaConf.create(),
        poll_interval=0.0,
        refill_fn=refill,
        train_batch_size=6,
        gen_batch_size=1,
        **more,
    )
    buffer.guard, buffer.known_rows = RolloutGuard(dict, tolerated=tolerated), {}
    return buffer


def prompt(queue, uid, status):
    queue[uid] = {"is_prompt": True, "global_steps": 1, "status": status}


def test_sync_goes_on_without_a_prompt_that_failed_but_not_without_all(queue):
    for uid in "ab":
        prompt(queue, uid, "failure")
    queue.update(b_1_0={})
    with pytest.raises(RolloutError, match=r"2 prompts failed in a row.* for uid=a'"):
        buffer_of(ReplayBuffer, "sync", 1).sample(1, "train", 2)
    prompt(queue, "a", "finished")
    queue.update(a_0_0={}, a_1_0={})
    batch, _ = buffer_of(ReplayBuffer, "sync", 1).sample(1, "train", 2)
    assert batch.keys == ["a_0_0", "a_1_0", "b_1_0"]  # verl's choice


def test_async_does_not_replace_prompts_for_ever(queue):
    sent = []

    def refill(count):
        for _ in range(count):
            sent.append(f"u{len(sent)}")
            prompt(queue, sent[-1], "failure")

    refill(4)
    with pytest.raises(RolloutError, match="8 prompts failed in a row"):
        buffer_of(ReplayBufferAsync, "colocate_async", 4, refill).sample(1, "train", 4)
    assert len(sent) == 8


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
    monkeypatch.setattr(GdpoBuffer, "_classify_finished", lambda self, partition_id: None)
    buffer = buffer_of(ReplayBuffer, "sync", 0, refill, filter_groups_metric="score")
    buffer.in_rounds = True
    refill(6)
    batch, _ = buffer.sample(1, "train", 6)
    # two of u0 to u5 are dropped and twice as many sent, u6 to u9: with u7 and u8 there are 6
    assert batch.keys == [f"u{number}_0_0" for number in (1, 2, 4, 5, 7, 8)]
    assert len(sent) == 10
