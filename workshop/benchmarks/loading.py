"""Compares the import of verl's V1 trainer and reward managers with and without the plugin."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from workshop.benchmarks.measure import Row, seconds_of

IMPORTS = "import verl.trainer.ppo.v1, verl.experimental.reward_loop.reward_manager"
LOADING_GOAL = 1.1


def rows() -> Iterator[Row]:
    """CPU seconds of fresh interpreters in turns: `VERL_USE_EXTERNAL_PLUGINS=none` loads none."""
    ours, peers = seconds_of(
        partial(_load, "verl_gdpo"), partial(_load, "none"), torch.device("cpu"), _of_children
    )
    size, peer = "V1 trainer, reward managers", "verl alone"
    yield Row("import", size, ours, peer, peers, says="the peer's", goal=LOADING_GOAL)


def _load(plugins: str) -> None:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    command = [sys.executable, "-c", IMPORTS]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def _of_children() -> float:
    """The time in which others have the processor does not count."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
