"""Notices that rollouts failed or cannot come any more, where verl goes on or waits for ever.

An exception in one of verl's agent loops is logged there, and its prompt marked "failure". The sync
trainer then trains on what is left of the group, and counts such prompts in its metrics; the
asynchronous ones send out another prompt. That is verl's choice, and is left to it as long as some
prompts finish. But if a server or a worker is gone, all fail, again and again; and a prompt whose
agent loop died keeps its mark "running", and is waited for.

Relies on verl 0.9: the actors behind `reward_loop_manager`, `agent_loop_manager`,
`llm_server_manager` and `standalone_server_manager` of a trainer, as `rollout_actors` reads them;
on the names of TransferQueue's actors; and on Ray's `__ray_ready__`, which every actor answers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import ray

ANSWER_SECONDS = 10.0  # for actors to say that they live, once a prompt has failed
GO_ON = "A start with trainer.resume_mode=auto goes on from the last checkpoint"


class RolloutError(RuntimeError):
    """A rollout failed, or none will come any more."""


class RolloutGuard:
    """Is asked by the replay buffer at each look into TransferQueue.

    Args:
        actors: gives {what it is: Ray actor handle} of all that a rollout needs.
        tolerated: how many prompts may fail in a row while none finishes.
    """

    def __init__(self, actors: Callable[[], dict[str, Any]], *, tolerated: int) -> None:
        self._actors = actors
        self._tolerated = tolerated
        self._questions: dict[Any, str] = {}  # one at a time for each actor, which may be busy
        self._finished: set[str] = set()
        self._failed: set[str] = set()  # since a prompt last finished

    def check(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Look at the uids of all prompts that are finished and failed. Does not wait.

        Raises:
            RolloutError: an actor is dead, or too many prompts failed.
        """
        finished, failed = set(finished), set(failed)
        if finished - self._finished:
            self._failed.clear()
        is_new = not failed <= self._failed
        self._finished = finished
        self._failed |= failed
        # a dead actor may be why, and nothing is trained before that is known
        if dead := self._dead(ANSWER_SECONDS if is_new else 0):
            raise RolloutError(dead)
        if len(self._failed) > self._tolerated:
            raise RolloutError(
                f"{len(self._failed)} prompts failed in a row. Why: search the log for 'Error in "
                f"_run_prompt for uid={min(self._failed)}'. {GO_ON}"
            )

    def _dead(self, seconds: float) -> str | None:
        """Ask all actors, wait that long for answers, and say which one is dead."""
        asked = {*self._questions.values()}
        for name, actor in self._actors().items():
            if name not in asked:
                self._questions[actor.__ray_ready__.remote()] = name
        questions = list(self._questions)
        if not questions:
            return None
        for answer in ray.wait(questions, num_returns=len(questions), timeout=seconds)[0]:
            name = self._questions.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.ActorDiedError as error:
                reason = " ".join(str(error).split()).partition(" Some common causes")[0]
                return f"{name} died. {GO_ON}. Ray says: {reason}"
            except ray.exceptions.RayError:
                continue  # out of reach for now: it is asked again
        return None


def queue_actors() -> dict[str, Any]:
    """{name: Ray actor handle} of this run's TransferQueue, which has to be up by now."""
    if not ray.is_initialized():
        return {}
    ours = {"transfer_queue", ray.get_runtime_context().namespace}
    return {
        actor["name"]: ray.get_actor(actor["name"], actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("TransferQueue") and actor["namespace"] in ours
    }


def rollout_actors(trainer: Any) -> dict[str, Any]:
    """{what it is: Ray actor handle} of all that this V1 trainer's rollouts need by now."""
    found = dict(trainer.queue_actors)
    rewards = getattr(trainer, "reward_loop_manager", None)
    for number, worker in enumerate(getattr(rewards, "reward_loop_worker_handles", None) or ()):
        found[f"reward worker {number}"] = worker
    loops = getattr(trainer, "agent_loop_manager", None)  # a custom one need not have workers
    for number, worker in enumerate(getattr(loops, "agent_loop_workers", ())):
        found[f"agent loop worker {number}"] = worker
    for kind in ("llm", "standalone"):
        servers = getattr(trainer, f"{kind}_server_manager", None)
        if servers is None:
            continue
        found[f"load balancer ({kind})"] = servers.global_load_balancer
        for replica in servers.get_replicas():
            for node, server in enumerate(replica.servers):
                found[f"rollout server {replica.replica_rank}, node {node} ({kind})"] = server
    # a router of the user's own may be something else
    return {name: one for name, one in found.items() if isinstance(one, ray.actor.ActorHandle)}
