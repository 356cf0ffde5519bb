"""One counter of requests for all reward workers of a run: an actor of Ray.

Relies on Ray 2: a named actor that is made once (`get_if_exists`) and runs coroutines side by side
(`max_concurrency`); an awaitable `ObjectRef` with `future()`; and errors of an actor that come back
as a class of Ray's own, below ours, with the original as `cause`.
"""

import asyncio
from typing import Any

import ray

from verl_gdpo.scoring.limits import AllStuckError, Counter, Limits, RequestCounter

# The actor's name begins like this and continues with the limits. Ray gives each job a namespace of
# its own, so two runs of a cluster never meet.
ACTOR = "verl_gdpo"
# So many coroutines may wait in the actor for their permission.
MOST_WAITING = 1_000_000


def counter_of_run(limits: Limits) -> RequestCounter:
    """Return the counter of a run, which is shared where Ray runs, and else of this process."""
    if ray.is_initialized():
        return SharedCounter(limits)
    return Counter(limits)


class SharedCounter:
    """A `Counter` in an actor, which all reward workers of a run ask."""

    def __init__(self, limits: Limits) -> None:
        actor_class = ray.remote(Counter).options(
            name=f"{ACTOR} {limits}",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=MOST_WAITING,
        )
        self.actor = actor_class.remote(limits)

    async def allow(self) -> int:
        """Wait for all limits, and return the number of the request.

        Raises:
            AllStuckError: see `Places`.
        """
        allowed = self.actor.allow.remote()
        try:
            return await allowed  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            # Only who waits is cancelled. The actor goes on and gives the place, so it has to
            # come back.
            allowed.future().add_done_callback(self._give_back)
            raise
        except AllStuckError as error:
            # The text of Ray's own copy is a whole traceback.
            original = getattr(error, "cause", error)
            raise AllStuckError(str(original)) from None

    def _give_back(self, allowed: Any) -> None:
        if allowed.exception() is None:
            self.end(allowed.result())

    def begin(self, request: int) -> None:
        self.actor.begin.remote(request)

    def mark_stuck(self, request: int, label: str) -> None:
        self.actor.mark_stuck.remote(request, label)

    def end(self, request: int) -> None:
        self.actor.end.remote(request)
