"""What the watch says of actors that run, sleep or stand still, with Ray."""

import os
import signal
import time

import ray

from verl_gdpo.hooks import hang
from verl_gdpo.run import stacks


@ray.remote(num_cpus=0)
class Worker:
    """As verl's workers: with a coroutine, so that Ray answers while a method runs."""

    def __init__(self):
        stacks.register()

    async def wait(self):
        pass

    def pid(self):
        return os.getpid()

    def compute_log_prob(self):
        time.sleep(60)


def test_who_runs_a_method_or_does_not_answer_is_named(ray_session, monkeypatch):
    monkeypatch.setattr(hang, "ANSWER_SECONDS", 3.0)
    monkeypatch.setattr(stacks, "SPY_SECONDS", 3.0)
    workers = {name: Worker.remote() for name in ("idle", "busy", "stopped")}
    pids = {name: ray.get(worker.pid.remote()) for name, worker in workers.items()}
    said, _ = hang._looked_at(workers)
    assert said == "All its processes answer"
    workers["busy"].compute_log_prob.remote()
    os.kill(pids["stopped"], signal.SIGSTOP)
    try:
        said, found = hang._looked_at(workers)
    finally:
        os.kill(pids["stopped"], signal.SIGCONT)
    named = [f"{name} (process {pids[name]} on " for name in ("stopped", "busy")]
    assert said.startswith(f"Busy or silent: {named[0]}") and named[1] in said
    assert "idle" not in said
    assert "in compute_log_prob" in found
    for worker in workers.values():
        ray.kill(worker)
