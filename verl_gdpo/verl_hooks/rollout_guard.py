"""Stops the run when rollouts keep failing or can no longer arrive.

After an exception in an agent loop, verl logs it and marks the prompt "failure". The sync trainer
then trains on the rest of the group and counts such prompts in its metrics. The asynchronous
trainers send out another prompt. We do not change this as long as some prompts finish. But after
the death of a server or a worker, all prompts fail again and again. After the death of an agent
loop, its prompts keep the mark "running", and verl waits for them for ever.

Relies on verl 0.9: the actors behind a trainer's `reward_loop_manager`, `agent_loop_manager`,
`llm_server_manager` and `standalone_server_manager`, which `rollout_actors` reads, and the names of
TransferQueue's actors. Relies on Ray's `__ray_ready__`, which every actor answers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import ray

ANSWER_SECONDS = 10.0  # after a failed prompt, actors get this time to answer
GO_ON = "A start with trainer.resume_mode=auto continues from the last checkpoint"


class RolloutError(RuntimeError):
    """Rollouts fail, or no more rollouts can arrive."""


class RolloutGuard:
    """Finds dead actors and failed prompts; the replay buffer calls it at each poll.

    Args:
        actors: function that returns {description: Ray actor handle} of all that a rollout needs.
        tolerated: number of prompts that may fail in a row while none finishes.
    """

    def __init__(self, actors: Callable[[], dict[str, Any]], *, tolerated: int) -> None:
        self._actors = actors
        self._tolerated = tolerated
        self._questions: dict[Any, str] = {}  # open question: actor; only one for each actor
        self._finished: set[str] = set()
        self._failed: set[str] = set()  # prompts that failed since the last one finished

    def check(self, finished: Iterable[str], failed: Iterable[str]) -> None:
        """Check the actors and count failed prompts. It only waits after a new failure.

        Args:
            finished, failed: uids of all prompts that are finished or failed.

        Raises:
            RolloutError: an actor is dead, or too many prompts failed in a row.
        """
        finished, failed = set(finished), set(failed)
        if finished - self._finished:
            self._failed.clear()
        is_new = not failed <= self._failed
        self._finished = finished
        self._failed |= failed
        # after a new failure, wait for answers: an actor may be dead, and training must not go on
        self.raise_if_dead(ANSWER_SECONDS if is_new else 0)
        if len(self._failed) > self._tolerated:
            raise RolloutError(
                f"{len(self._failed)} prompts failed in a row. Why: search the log for 'Error in "
                f"_run_prompt for uid={min(self._failed)}'. {GO_ON}"
            )

    def raise_if_dead(self, seconds: float = ANSWER_SECONDS) -> None:
        """Wait for the actors' answers, at most so long.

        Raises:
            RolloutError: an actor is dead.
        """
        if dead := self._dead(seconds):
            raise RolloutError(dead)

    def _dead(self, seconds: float) -> str | None:
        """Ask all actors, wait for their answers, and return a message about a dead one."""
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
                continue  # the actor cannot be reached now; the next call asks it again
        return None


def queue_actors() -> dict[str, Any]:
    """Return {name: Ray actor handle} of this run's TransferQueue, which must be running."""
    if not ray.is_initialized():
        return {}
    ours = {"transfer_queue", ray.get_runtime_context().namespace}
    return {
        actor["name"]: ray.get_actor(actor["name"], actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("TransferQueue") and actor["namespace"] in ours
    }


def rollout_actors(trainer: Any) -> dict[str, Any]:
    """Return {description: Ray actor handle} of all actors that this trainer's rollouts need."""
    found = dict(getattr(trainer, "queue_actors", {}))  # the legacy trainer has none
    rewards = getattr(trainer, "reward_loop_manager", None)
    for number, worker in enumerate(getattr(rewards, "reward_loop_worker_handles", None) or ()):
        found[f"reward worker {number}"] = worker
    loops = getattr(trainer, "agent_loop_manager", None) or getattr(  # of the legacy trainer
        trainer, "async_rollout_manager", None
    )  # a custom manager may lack workers
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
    # a router of the user may be another object than an actor
    return {name: one for name, one in found.items() if isinstance(one, ray.actor.ActorHandle)}
