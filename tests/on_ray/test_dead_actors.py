"""Real Ray actors that die or hang: the run ends, and its message names them."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import ray

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.hooks import rollout_guard
from verl_gdpo.hooks.extend import extend_instance
from verl_gdpo.hooks.rollout_guard import (
    Prompts,
    RolloutError,
    RolloutGuard,
    naming_the_trainer,
    rollout_actors,
    training_workers,
)
from verl_gdpo.hooks.trainer import TrainerRecord


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


def prompts(kept=(), lost=(), under_way=0, partly=()):
    failed = {*lost, *partly}
    return Prompts({*kept} | failed, failed, {*lost}, under_way)


def test_a_dead_actor_is_named_without_a_failed_prompt(ray_session):
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
        guard.check({})
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(RolloutError) as raised:
        while True:
            guard.check({})
    message = str(raised.value)
    assert message.startswith("rollout server 1, node 0 (llm) died. A start with trainer.resume")
    assert f"pid: {pids[3]}" in message
    assert "\n" not in message


def test_a_busy_actor_is_asked_once_and_is_not_dead(ray_session, tmp_path):
    (worker,), _ = start(1)
    busy = worker.wait_for.remote(str(tmp_path / "go"))
    guard = RolloutGuard(lambda: {"a worker": worker}, tolerated=0)
    for _ in range(3):
        guard.check({})
    (question,) = guard._questions
    (tmp_path / "go").touch()
    assert ray.get([busy, question], timeout=30)[1]


def test_an_actor_that_does_not_answer_is_named_where_prompts_fail(
    ray_session, tmp_path, monkeypatch
):
    monkeypatch.setattr(rollout_guard, "ANSWER_SECONDS", 1.0)
    workers, _ = start(2)
    busy = workers[0].wait_for.remote(str(tmp_path / "go"))
    named = {"reward worker 0": workers[0], "reward worker 1": workers[1]}
    monkeypatch.setattr(rollout_guard, "LEAST_TOLERATED", 0)
    guard = RolloutGuard(lambda: named, tolerated=0)
    with pytest.raises(RolloutError, match=r"of them\. reward worker 0 does not answer\. Why: "):
        guard.check({"train": prompts(lost={"a"})})
    (tmp_path / "go").touch()
    ray.get(busy, timeout=30)
    guard.raise_if_dead(5.0)
    with pytest.raises(RolloutError, match=r"of them\. Why: "):
        guard.raise_failed("all 2", "train", "a")


def test_a_dead_actor_is_the_reason_why_prompts_fail(ray_session):
    (worker,), (pid,) = start(1)
    guard = RolloutGuard(lambda: {"reward worker 0": worker}, tolerated=100)
    os.kill(pid, signal.SIGKILL)
    # at once, before anything is trained on what is left
    with pytest.raises(RolloutError, match="reward worker 0 died"):
        guard.check({"train": prompts({"a"}, partly={"b"})})


def test_an_answer_from_before_the_death_does_not_count(ray_session):
    (worker,), (pid,) = start(1)
    guard = RolloutGuard(lambda: {"reward worker 0": worker}, tolerated=100)
    guard.check({})
    ray.get([*guard._questions], timeout=30)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RolloutError, match="reward worker 0 died"):
        guard.raise_if_node_died()


class DyingTrainer:
    """Calls a worker that gets SIGKILL, as verl does: it lets Ray's error through.

    asks: the actor that it asks, which may be another one, that calls the dead one in turn.
    """

    def __init__(self, pid, question, **attributes):
        self.pid, self.question = pid, question
        for name, value in attributes.items():
            setattr(self, name, value)

    def fit(self, agent_loop_manager):
        os.kill(self.pid, signal.SIGKILL)
        ray.get(self.question())


def extended(trainer):
    extend_instance(trainer, "PPOTrainer", TrainerRecord(GdpoSettings(), True))
    return trainer


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        (
            lambda worker: {"agent_loop_manager": SimpleNamespace(agent_loop_workers=[worker])},
            "agent loop worker 0",
        ),
        (
            lambda worker: {"actor_rollout_wg": SimpleNamespace(workers=[worker])},
            "training worker 0",
        ),
        (lambda worker: {"critic_wg": SimpleNamespace(workers=[worker])}, "critic worker 0"),
        (lambda worker: {}, None),  # a worker that only verl has
    ],
)
def test_an_actor_that_dies_while_verl_calls_it(ray_session, attributes, name):
    """Ray's error says neither what it was for nor how to go on."""
    (worker,), (pid,) = start(1)
    trainer = extended(DyingTrainer(pid, worker.pid.remote, **attributes(worker)))
    error = RolloutError if name else ray.exceptions.ActorDiedError
    said = rf"{name} died\. A start with trainer\.resume_mode=auto" if name else "unexpectedly"
    with pytest.raises(error, match=said) as raised:
        trainer.fit(None)
    if name:
        assert f"pid: {pid}" in str(raised.value)
        assert "The memory may have run out (see dmesg)" in str(raised.value)


@ray.remote(num_cpus=0)
class Rank:
    """Of a collective: it misses a peer that dies, or waits for it for ever."""

    def pid(self):
        return os.getpid()

    def ask(self, peer):
        try:
            ray.get(peer.pid.remote())
        except ray.exceptions.RayError:
            raise RuntimeError("Connection closed by peer") from None

    def hang(self):
        time.sleep(600)


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_what_its_peers_say(ray_session):
    """Of two that live, one says that it misses another, and one does not answer at all."""
    ranks = [Rank.remote() for _ in range(3)]
    _, pid, _ = ray.get([rank.pid.remote() for rank in ranks])
    ranks[2].hang.remote()
    group = SimpleNamespace(workers=ranks)

    def question():
        return ranks[0].ask.remote(ranks[1])

    trainer = extended(DyingTrainer(pid, question, actor_rollout_wg=group, ref_policy_wg=group))
    died = pytest.raises(RolloutError, match=r"^training worker 1 died\. A start with")
    with died:
        trainer.fit(None)
    with died:  # it does not wait for the one that hangs
        RolloutGuard(lambda: training_workers(trainer), tolerated=0).raise_if_dead(3600.0)


@pytest.mark.parametrize("is_the_trainer", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_trainers_process_dies(ray_session, is_the_trainer):
    """The driver waits for it; what it says of another actor stays as it is."""

    @ray.remote(num_cpus=0)
    class Trainer:
        def run(self, other):
            os.kill(os.getpid() if is_the_trainer else ray.get(other.pid.remote()), signal.SIGKILL)
            ray.get(other.pid.remote())

    (other,), _ = start(1)
    said = r"^the trainer's process or its node died\. A start with .* Ray says: The a"
    error = RolloutError if is_the_trainer else ray.exceptions.RayTaskError
    with (
        pytest.raises(error, match=said if is_the_trainer else "Trainer.run"),
        naming_the_trainer(),
    ):
        ray.get(Trainer.remote().run.remote(other))
