"""Compares the import of verl's V1 trainer and reward managers with and without the plugin."""

import os
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

    def of_children() -> float:
        """The time in which others have the processor does not count."""
        return sum(os.times()[2:4])

    with_ours, alone = (partial(_load, plugins) for plugins in ("verl_gdpo", "none"))
    ours, peers = seconds_of(with_ours, alone, torch.device("cpu"), of_children)
    size, peer = "V1 trainer, reward managers", "verl alone"
    yield Row("import", size, ours, peer, peers, says="the peer's", goal=LOADING_GOAL)


def _load(plugins: str) -> None:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    command = [sys.executable, "-c", IMPORTS]
    subprocess.run(command, env=environment, check=True, capture_output=True)
