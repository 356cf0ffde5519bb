"""Runs a script of this folder as both ranks of a process group, without a GPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_two_ranks(script, *arguments):
    """The script gets the arguments, and torch's variables; both have to end with 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    environment = {**os.environ, **group, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__).with_name(script), *arguments],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
