"""Which modules of verl_gdpo a rollout passes, in the order in which they are first entered."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

import verl_gdpo
from verl_gdpo.hooks.extend import load_all, record_of

PACKAGE = f"{Path(verl_gdpo.__file__).parent}/"
# imports, and what only reads a key of verl
PASSED_BY = ("<module>", "of_text", "of_uids")
MECHANISM = (
    "cpu/",
    "hooks/call.py",
    "hooks/extend.py",
    "hooks/lookup.py",
    "hooks/net.py",
    "hooks/refusal.py",
)


class Trace:
    """A function for `sys.setprofile`, with the paths in `verl_gdpo/` that were entered."""

    def __init__(self):
        self.modules = {}  # a set that keeps the order

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            path = code.co_filename.removeprefix(PACKAGE)
            if code.co_name not in PASSED_BY and not path.startswith(MECHANISM):
                self.modules[path] = True


def trace_agent_loops(worker):
    load_all()  # what runs while a module is imported is no part of the way
    worker.trace, run_prompt = Trace(), worker._run_prompt

    async def run_traced_prompt(*args, **kwargs):
        sys.setprofile(worker.trace)
        await run_prompt(*args, **kwargs)

    worker._run_prompt = run_traced_prompt


def trace_rewards(worker, sources):
    """Trace the event loop, and the threads that it starts from now on."""
    load_all()
    worker.reward_manager.cannot_score(sources)  # asked before the first step
    worker.trace = Trace()
    threading.setprofile(worker.trace)
    worker.loop.set_default_executor(ThreadPoolExecutor())
    worker.loop.call_soon_threadsafe(sys.setprofile, worker.trace)


def modules_of_a_step(stage, trainer, sources):
    """Make a step of `trainer`, with its dump, and return the modules that ran.

    They stand in the order in which a rollout is in verl's processes: agent loop worker, reward
    worker, trainer. The workers are traced until they end.
    """
    record_of(trainer).ask_reward_workers(trainer)  # as verl's set-up does before the first step
    (loops,), (rewards,) = stage.loops.agent_loop_workers, stage.rewards.reward_loop_workers
    ray.get(loops.__ray_call__.remote(trace_agent_loops))
    ray.get(rewards.__ray_call__.remote(trace_rewards, sources))
    load_all()
    trace = Trace()
    sys.setprofile(trace)
    try:
        stage.step(trainer)
    finally:
        sys.setprofile(None)
    found = ray.get([w.__ray_call__.remote(lambda w: w.trace.modules) for w in (loops, rewards)])
    return [*dict.fromkeys([*found[0], *found[1], *trace.modules])]
