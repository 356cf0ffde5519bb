"""What hangs in a run of tests/slow/faults.py, from the moment when the file of $HANG exists.

verl loads it in every process, through VERL_USE_EXTERNAL_MODULES, and as the file of a reward
function.
"""

import os
import threading
from pathlib import Path

import varied_reward

LOCK = threading.Lock()
without_signal_for_some = varied_reward.without_signal_for_some


def hangs(what):
    path = Path(os.environ["HANG"])
    return path.name == what and path.exists()


def deadlock():
    with LOCK, LOCK:
        raise AssertionError("nobody gets here")


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if hangs("scorer"):
        deadlock()
    return varied_reward.compute_score(data_source, solution_str, ground_truth, extra_info)


def leave_out_a_collective(torch):
    reduce = torch.distributed.all_reduce

    def all_reduce(*args, **kwargs):
        if not (hangs("collective") and os.environ.get("RANK") == "1"):
            reduce(*args, **kwargs)

    torch.distributed.all_reduce = all_reduce


if "HANG" in os.environ:
    import torch

    leave_out_a_collective(torch)
