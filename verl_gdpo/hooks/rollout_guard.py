"""Stops the run when rollouts keep failing or can no longer arrive.

After an exception in an agent loop, verl logs it and marks the prompt "failure". The sync trainer
and validation then go on with the rest of the group, and the asynchronous trainers send out another
prompt. We do not change this as long as more prompts are kept than lost. But after the death of a
server or a worker, all prompts fail again and again. After the death of an agent loop, its prompts
keep the mark "running", and verl waits for them for ever.

Relies on verl 0.9: the actors behind a trainer's `reward_loop_manager`, `agent_loop_manager`,
`llm_server_manager` and `standalone_server_manager`, which `rollout_actors` reads, the `workers` of
its worker groups, which `training_workers` reads, and the names of TransferQueue's actors. Relies
on Ray's `__ray_ready__`, which every actor answers.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import ray

from verl_gdpo.hooks.extend import record_of
from verl_gdpo.terminal import GO_ON

# After a failed prompt, actors get this time to answer.
ANSWER_SECONDS = 10.0
# By then Ray knows that a node has died, also if its machine lost its power.
NODE_SECONDS = 90.0
# More prompts than this may be lost than are kept, however small the batch is: by chance, prompts
# of which less than 4 in 10 are lost do not get there.
LEAST_TOLERATED = 32
# {attribute that a trainer may have: what messages call its worker group}
TRAINING_WORKERS = {
    "actor_rollout_wg": "training worker",
    "actor_wg": "training worker",
    "critic_wg": "critic worker",
    "ref_policy_wg": "reference worker",
}


class RolloutError(RuntimeError):
    """Rollouts fail, or no more rollouts can arrive."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of one partition of TransferQueue that verl has not yet taken out of it.

    ended: uids of those that finished or failed.
    failed: uids of those of which a rollout failed.
    lost: uids of the failed ones of which verl uses nothing, or too little for an advantage.
    under_way: number of those that have not ended.
    """

    ended: set[str]
    failed: set[str]
    lost: set[str]
    under_way: int


@dataclass
class _Count:
    """What has become of the prompts of one partition since more were last kept than lost.

    ended: uids of the prompts that had ended at the last look.
    example: uid of a lost prompt, for the message.
    """

    ended: set[str] = field(default_factory=set)
    kept: int = 0
    lost: int = 0
    example: str = ""


class RolloutGuard:
    """Finds dead actors and lost prompts; the replay buffer calls it at each poll.

    Training and validation are counted apart, each prompt once. Over a long time, the run ends if
    more than half of the prompts are lost. Over a short time it needs an excess of lost prompts,
    because a batch may be small and a service may be away for a moment. Prompts under way are taken
    as kept, and a batch is judged as a whole: the prompts that fail may end first, or last.

    Args:
        actors: function that returns {description: Ray actor handle} of all that a rollout needs.
        tolerated: how many more prompts of a training may be lost than kept, at least
            `LEAST_TOLERATED`, which holds for validation.
    """

    def __init__(self, actors: Callable[[], dict[str, Any]], *, tolerated: int) -> None:
        self._actors = actors
        self._tolerated = max(tolerated, LEAST_TOLERATED)
        # {open question: actor}. An actor has one open question at a time.
        self._questions: dict[Any, str] = {}
        # Actors for whose answer it has waited in vain.
        self._silent: set[str] = set()
        self._counts: defaultdict[str, _Count] = defaultdict(_Count)

    def check(self, partitions: Mapping[str, Prompts]) -> None:
        """Check the actors, and count the prompts that ended. It only waits after a new failure.

        Args:
            partitions: {name: its prompts}.

        Raises:
            RolloutError: an actor is dead, or too many prompts were lost.
        """
        has_failure = False
        for name, prompts in partitions.items():
            count = self._counts[name]
            fresh = prompts.ended - count.ended
            lost = fresh & prompts.lost
            count.ended = prompts.ended
            count.lost += len(lost)
            count.kept += len(fresh) - len(lost)
            # A set has no order, so the message names the first by its uid.
            count.example = min(lost, default=count.example)
            if not fresh.isdisjoint(prompts.failed):
                has_failure = True
        # After a new failure, it waits for answers: an actor may be dead, and then training must
        # not go on.
        seconds = 0.0
        if has_failure:
            seconds = ANSWER_SECONDS
        self.raise_if_dead(seconds)
        for name, prompts in partitions.items():
            count = self._counts[name]
            tolerated = self._tolerated
            if name == "val":
                tolerated = LEAST_TOLERATED
            if count.lost - count.kept - prompts.under_way > tolerated:
                ended = count.lost + count.kept
                self.raise_failed(f"{count.lost} of the last {ended}", name, count.example)

    def end_batch(self, partition: str) -> None:
        """Forget the prompts of the partition so far, unless more of them were lost than kept."""
        count = self._counts[partition]
        if count.lost <= count.kept:
            count.lost = 0
            count.kept = 0

    def raise_if_dead(self, seconds: float = ANSWER_SECONDS) -> None:
        """Ask all actors, and wait for their answers, at most so long.

        Raises:
            RolloutError: an actor is dead.
        """
        if seconds:
            # Answers to these questions can be from before a death.
            self._questions.clear()
        # An actor that hangs would else get another question at each poll.
        asked = set(self._questions.values())
        for name, actor in self._actors().items():
            if name not in asked:
                self._questions[actor.__ray_ready__.remote()] = name
        questions = list(self._questions)
        if seconds:
            # An actor is silent until its answer has come.
            self._silent.update(self._questions.values())
        for answer in _answers(questions, seconds):
            name = self._questions.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.ActorDiedError as error:
                raise RolloutError(died(name, error)) from None
            except ray.exceptions.RayError:
                # The actor cannot be reached now. The next call asks it again.
                continue
            self._silent.discard(name)

    def raise_if_node_died(self, seconds: float = NODE_SECONDS) -> None:
        """Ask all actors until each has answered, so that the death of a node is known by then.

        Raises:
            RolloutError: an actor is dead.
        """
        give_up = time.monotonic() + seconds
        left = seconds
        while left > 0:
            self.raise_if_dead(left)
            if not self._silent:
                return
            # Of an actor whose node died, Ray says first that it cannot be reached.
            time.sleep(1)
            left = give_up - time.monotonic()

    def raise_failed(self, which: str, partition: str, uid: str) -> NoReturn:
        """Raise RolloutError for prompts that failed, `uid` among them."""
        silent = "".join(f"{name} does not answer. " for name in sorted(self._silent))
        raise RolloutError(
            f"{which} prompts of the partition {partition!r} failed, and verl can use nothing of "
            f"them. {silent}Why: search the log for 'Error in _run_prompt for uid={uid}'. {GO_ON}"
        )


def _answers(questions: list[Any], seconds: float) -> Iterator[Any]:
    """Yield the questions that are answered, as they are, at most so long.

    A dead actor is known before one that hangs with it, as the ranks of a collective do.
    """
    give_up = time.monotonic() + seconds
    waiting = questions
    if waiting:
        # What is answered by now comes as a whole, also where there is no time to wait.
        answered, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        yield from answered
    while waiting and time.monotonic() < give_up:
        left = max(0.0, give_up - time.monotonic())
        answered, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        yield from answered


def died(name: str, error: Exception) -> str:
    """Return one line about an actor of which Ray says this."""
    reason, causes, _ = " ".join(str(error).split()).partition(" Some common causes")
    hint = ""
    if causes:
        # Ray lists causes where it knows none.
        hint = " The memory may have run out (see dmesg), or its last lines in the log say why."
    return f"{name} died. {GO_ON}. Ray says: {reason}{hint}"


@contextmanager
def naming_the_dead(trainer: Any) -> Iterator[None]:
    """Raise RolloutError if an actor of this trainer has died, where the block gets Ray's error.

    Ray's error is of the dead actor, or of one that misses it: a rank of a collective, or a rank
    whose peer was on a node that died.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        workers = training_workers(trainer)
        for name, worker in workers.items():
            if _is_of(error, worker):
                raise RolloutError(died(name, error)) from None
        # Actors of rollouts may have died without an error of their own, which takes Ray a while.
        RolloutGuard(lambda: rollout_actors(trainer), tolerated=0).raise_if_node_died()
        RolloutGuard(lambda: workers, tolerated=0).raise_if_dead()
        raise


def _is_of(error: Exception, actor: Any) -> bool:
    """Whether Ray says by this error that the actor has died."""
    if isinstance(error, ray.exceptions.RayTaskError):
        # Another actor says so, and lives.
        return False
    if not isinstance(error, ray.exceptions.ActorDiedError):
        return False
    return bool(error.actor_id == actor._actor_id.hex())


def ray_is_running() -> bool:
    """Return whether this process has started Ray, or is connected to it."""
    return bool(ray.is_initialized())


@contextmanager
def naming_the_trainer() -> Iterator[None]:
    """Raise RolloutError if the actor that the block waits for dies, as with its node."""
    try:
        yield
    except ray.exceptions.RayActorError as error:
        if isinstance(error, ray.exceptions.RayTaskError):
            # The trainer lives, and says this of another actor.
            raise
        raise RolloutError(died("the trainer's process or its node", error)) from error


def queue_actors() -> dict[str, Any]:
    """Return {name: Ray actor handle} of this run's TransferQueue, which must be running."""
    # Without Ray there is no queue that could die.
    if not ray.is_initialized():
        return {}
    # Other namespaces of the cluster are other runs.
    ours = {"transfer_queue", ray.get_runtime_context().namespace}
    actors = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name = actor["name"]
        if name.startswith("TransferQueue") and actor["namespace"] in ours:
            actors[name] = ray.get_actor(name, actor["namespace"])
    return actors


def training_workers(trainer: Any) -> dict[str, Any]:
    """Return {description: Ray actor handle} of the processes of a trainer's worker groups.

    A process that is a rank of several groups has the first one's name.
    """
    named: dict[str, Any] = {}
    for attribute, kind in TRAINING_WORKERS.items():
        group = getattr(trainer, attribute, None)
        for rank, worker in enumerate(getattr(group, "workers", None) or ()):
            if isinstance(worker, ray.actor.ActorHandle) and worker not in named.values():
                named[f"{kind} {rank}"] = worker
    return named


def rollout_actors(trainer: Any) -> dict[str, Any]:
    """Return {description: Ray actor handle} of all actors that this trainer's rollouts need."""
    actors: dict[str, Any] = {}
    record = record_of(trainer)
    if record:
        actors.update(record.queue_actors)
    rewards = getattr(trainer, "reward_loop_manager", None)
    for number, worker in enumerate(getattr(rewards, "reward_loop_worker_handles", None) or ()):
        actors[f"reward worker {number}"] = worker
    # The legacy trainer has the manager of agent loops under another name.
    loops = getattr(trainer, "agent_loop_manager", None)
    if not loops:
        loops = getattr(trainer, "async_rollout_manager", None)
    # A manager of the user's may lack workers.
    for number, worker in enumerate(getattr(loops, "agent_loop_workers", ())):
        actors[f"agent loop worker {number}"] = worker
    for kind in ("llm", "standalone"):
        servers = getattr(trainer, f"{kind}_server_manager", None)
        if servers is None:
            continue
        actors[f"load balancer ({kind})"] = servers.global_load_balancer
        for replica in servers.get_replicas():
            for node, server in enumerate(replica.servers):
                actors[f"rollout server {replica.replica_rank}, node {node} ({kind})"] = server
    # A router of the user's may be another object than an actor, which nobody can ask.
    return {
        name: actor for name, actor in actors.items() if isinstance(actor, ray.actor.ActorHandle)
    }
