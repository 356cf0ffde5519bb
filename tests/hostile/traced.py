"""Which modules of verl_gdpo a rollout passes, in the order in which they are first entered."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

import verl_gdpo

PACKAGE = f"{Path(verl_gdpo.__file__).parent}/"


class Trace:
    """A function for `sys.setprofile`, with the paths in `verl_gdpo/` that were entered."""

    def __init__(self):
        self.modules = {}  # as a set that keeps the order

    def __call__(self, frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            self.modules[code.co_filename.removeprefix(PACKAGE)] = True


def start(worker):
    """Trace the event loop of one of verl's workers, and the threads that it starts from now on."""
    worker.trace = Trace()
    threading.setprofile(worker.trace)
    worker.loop.set_default_executor(ThreadPoolExecutor())
    worker.loop.call_soon_threadsafe(sys.setprofile, worker.trace)


def stop(worker):
    threading.setprofile(None)
    worker.loop.call_soon_threadsafe(sys.setprofile, None)
    return [*worker.trace.modules]


def modules_of_a_step(stage, trainer):
    """Make a step of `trainer`, with its rollout dump, and return the modules that ran.

    Those of the reward worker come first, because a rollout is there before it is in the trainer.
    """
    (worker,) = stage.rewards.reward_loop_workers
    ray.get(worker.__ray_call__.remote(start))
    trace = Trace()
    sys.setprofile(trace)
    try:
        stage.step(trainer)
    finally:
        sys.setprofile(None)
        of_rewards = ray.get(worker.__ray_call__.remote(stop))
    return [*dict.fromkeys([*of_rewards, *trace.modules])]
