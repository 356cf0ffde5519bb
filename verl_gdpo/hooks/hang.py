"""Ends a run that makes no progress, and says which of its processes do not answer.

    trainer:
      hang_minutes: 10    # the floor of every limit; 0 switches this off

Relies on verl 0.9:
- `verl.utils.debug.marked_timer(name, ...)`, which every trainer puts around the parts of a step;
- the trainer's `*_wg`, whose `workers` are Ray actors, and what `rollout_actors` reads.
Relies on Ray 2: `__ray_ready__`, `__ray_call__`, `ray._private.state.actors`, which knows the
process and node of an actor, and the function `METHOD`, which calls the methods of actors.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.utils import debug

from verl_gdpo.hooks.extend import Function, extends
from verl_gdpo.run.folder import of_recipes
from verl_gdpo.run.heartbeat import BETWEEN, MINUTES, START, START_FACTOR, Clock, Heartbeat, remove
from verl_gdpo.run.stacks import HANG_FILE, stacks_of

logger = logging.getLogger(__name__)

KEY = "trainer.hang_minutes"
TICK_SECONDS = 2.0
ANSWER_SECONDS = 10.0
STACK_SECONDS = 60.0  # of a process on another node
RAISED_SECONDS = 30.0  # the trainer gets this time to end by an exception
SIGNAL = signal.SIGRTMIN + 8
METHOD = "actor_method_executor"  # in the stack of an actor that runs a method
GO_ON = "A start with trainer.resume_mode=auto continues from the last checkpoint"


class HangError(RuntimeError):
    """The run made no progress for too long."""


def seconds_of(config: Any) -> float:
    """Return the floor of the limits that `trainer.hang_minutes` sets; 0 if it is off.

    Raises:
        ValueError: the key holds something else than a number of minutes.
    """
    minutes = OmegaConf.select(config, KEY, default=MINUTES)
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes >= 0:
        raise ValueError(f"{KEY}={minutes!r}: expected minutes, such as 10, or 0 for no limit")
    return 60.0 * minutes


class Watch(threading.Thread):
    """Watches the trainer of this process until `end`."""

    def __init__(self, trainer: Any, floor: float, base: str = START) -> None:
        super().__init__(daemon=True)
        self.clock = Clock(floor, base)
        self._trainer = trainer
        config = trainer.config
        self._run = Path(config.run_dir).resolve() if of_recipes(config) else None
        self._ended = threading.Event()
        self._message = ""
        self._has_warned = False
        self._asked: dict[Any, str] = {}  # open questions for samples
        self._samples: dict[str, int] = {}  # finished, by agent loop worker
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._raise)

    def end(self) -> None:
        """Watch no more."""
        self._ended.set()
        self.join(ANSWER_SECONDS)  # else it could write the file once more
        if self._run is not None:
            remove(self._run)

    def run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(TICK_SECONDS):
            now = time.monotonic()
            self.clock.tick(min(now - last, 2 * TICK_SECONDS))
            last = now
            self._ask_for_samples_safely()
            if self._run is not None:
                self._heartbeat().write(self._run)
            if self.clock.is_overdue:
                stacks = self._look()
                # something may have moved meanwhile, or the trainer has ended with its own error
                if self.clock.is_overdue and not self._ended.is_set():
                    self._stop_the_run(stacks)
                    return

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            process=os.getpid(),
            phase=self.clock.current,
            step=getattr(self._trainer, "global_steps", None),
            samples=sum(self._samples.values()),
            limit=self.clock.floor,
        )

    def _ask_for_samples_safely(self) -> None:
        try:
            self._ask_for_samples()
        except Exception:  # the watch must not end while the run goes on
            if not self._has_warned:
                logger.warning("verl-gdpo: samples are not counted for %s", KEY, exc_info=True)
            self._has_warned = True

    def _ask_for_samples(self) -> None:
        """Ask the agent loop workers how many samples they have finished, and read answers."""
        import ray

        from verl_gdpo.hooks.agent_loop import finished_samples

        if not ray.is_initialized():  # a question would start Ray, or join another one
            return
        actors = self._actors("agent loop worker")
        for name in actors.keys() - {*self._asked.values()}:
            self._asked[actors[name].__ray_call__.remote(finished_samples)] = name
        for answer in ray.wait([*self._asked], num_returns=len(self._asked), timeout=0)[0]:
            name, finished = self._asked.pop(answer), ray.get(answer)
            if self._samples.get(name) != finished:
                self._samples[name] = finished
                self.clock.progress()

    def _actors(self, kind: str = "") -> dict[str, Any]:
        """{description: Ray actor} of this run; of those whose description begins with `kind`."""
        from verl_gdpo.hooks.rollout_guard import rollout_actors

        found = rollout_actors(self._trainer)
        for role, group in {**vars(self._trainer)}.items():  # while it sets others
            if role.endswith("_wg"):
                for rank, worker in enumerate(getattr(group, "workers", ())):
                    found.setdefault(f"{role.removesuffix('_wg')} rank {rank}", worker)
        return {name: actor for name, actor in found.items() if name.startswith(kind)}

    def _look(self) -> str:
        """Note what hangs as the message; return the stacks."""
        try:
            silent, stacks = _looked_at(self._actors())
            silent += _being_scored(self._actors("reward worker"))
        except Exception as error:  # the run ends all the same
            silent, stacks = f"Why is not known: {error!r}", stacks_of(os.getpid())
        step = getattr(self._trainer, "global_steps", 0)
        place = f" The stacks of all processes: {self._run / HANG_FILE}." if self._run else ""
        self._message = (
            f"no progress for {self.clock.seconds:.0f} s in the phase {self.clock.current!r} of "
            f"step {step}, which may take {self.clock.limit:.0f} s ({KEY}). "
            f"{silent}.{place} {GO_ON}"
        )
        return stacks

    def _stop_the_run(self, stacks: str) -> None:
        """Say what hangs, and make the trainer raise, or end its process if it does not."""
        text = f"HangError: {self._message}\n\n{stacks}"
        print(text, file=sys.stderr, flush=True)
        if self._run is not None:
            with suppress(OSError):
                (self._run / HANG_FILE).write_text(text)
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        time.sleep(RAISED_SECONDS)
        os._exit(1)

    def _raise(self, *_: object) -> None:
        raise HangError(self._message)


def _looked_at(actors: Mapping[str, Any]) -> tuple[str, str]:
    """Return which actors do not answer or run a method, and all stacks with this process's.

    verl's workers answer while they run a method: a class with a coroutine has a thread for it.
    """
    import ray

    asked = {actor.__ray_ready__.remote(): name for name, actor in actors.items()}
    answered, silent = ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS)
    names = [asked[answer] for answer in silent]
    found, said = dict[int, str](), []
    for name in [*names, *(asked[answer] for answer in answered)]:
        state = ray._private.state.actors(actors[name]._actor_id.hex())
        process, node = state.get("Pid"), state.get("Address", {})
        where = f"{name} (process {process} on {node.get('IPAddress')})"
        if process not in found:  # one actor may have several roles
            found[process] = f"{where}: {_stacks_on(node.get('NodeID'), process)}"
            if name in names or METHOD in found[process]:
                said.append(where)
    stacks = [*found.values(), f"the trainer: {stacks_of(os.getpid())}"]
    silence = f"Busy or silent: {', '.join(said)}" if said else "All its processes answer"
    return silence, "\n\n".join(stacks)


def _being_scored(workers: Mapping[str, Any]) -> str:
    """Return which samples the reward workers score, as far as they answer."""
    import ray

    from verl_gdpo.hooks.reward_manager import being_scored

    asked = {worker.__ray_call__.remote(being_scored): name for name, worker in workers.items()}
    said = []
    for answer in ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS)[0]:
        with suppress(ray.exceptions.RayError):
            if label := ray.get(answer):
                said.append(f"; {asked[answer]} scores {label}")
    return "".join(said)


def _stacks_on(node: str, process: int) -> str:
    import ray

    from verl_gdpo.hooks.nodes import on_node

    if node == ray.get_runtime_context().get_node_id():
        return stacks_of(process)
    try:
        return str(ray.get(on_node(node, stacks_of).remote(process), timeout=STACK_SECONDS))
    except ray.exceptions.RayError as error:
        return f"no stacks: {error}"


def begin_heartbeat(config: Any) -> None:
    """Write the first heartbeat of a run, before Ray starts the trainer's process.

    Raises:
        ValueError: see `seconds_of`.
    """
    floor = seconds_of(config)
    if floor and of_recipes(config) and Path(config.run_dir).is_dir():
        Heartbeat(os.getpid(), START, None, 0, START_FACTOR * floor).write(Path(config.run_dir))


_watch: Watch | None = None


def end_watch() -> None:
    """Watch no trainer any more."""
    global _watch
    if _watch is not None:
        _watch.end()
    _watch = None


@contextmanager
def watched_from(trainer: Any, base: str = START) -> Iterator[None]:
    """Watch the trainer from this block on, unless `trainer.hang_minutes` is 0.

    If the block raises, the watch ends.

    Args:
        base: what goes on outside of all phases; see `Clock`.
    """
    global _watch
    end_watch()
    if floor := seconds_of(trainer.config):
        _watch = Watch(trainer, floor, base)
        _watch.start()
    try:
        yield
    except BaseException:
        end_watch()
        raise


@contextmanager
def watched(trainer: Any) -> Iterator[None]:
    """Watch the trainer during its `fit`, whose steps may have no phases that we know."""
    with watched_from(trainer, BETWEEN):
        yield
    end_watch()


@extends(debug, "marked_timer")
@contextmanager
def note_phases(marked_timer: Function, name: str, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Tell the watch."""
    phase = nullcontext() if _watch is None else _watch.clock.phase(name)
    with phase, marked_timer(name, *args, **kwargs) as value:
        yield value
