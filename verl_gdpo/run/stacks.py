"""Reads the stacks of another process of a run, also of one that hangs.

A process that loads the plugin writes them itself: see `verl_gdpo/stacks.py`. One that is stopped
does not get a signal: py-spy reads its stacks, where it is installed and may read them.
"""

import os
import shutil
import subprocess
import time

import psutil

from verl_gdpo.stacks import SIGNAL, files_of

HANG_FILE = "hang.txt"  # in the folder of a run that hung
WRITTEN_SECONDS, SPY_SECONDS = 3.0, 20.0  # the longest time to wait for either
POLL_SECONDS = 0.1


def stacks_of(process_id: int) -> str:
    """Return the state of a process on this machine and the stacks of its threads, or why not."""
    try:
        process = psutil.Process(process_id)
        said = f"process {process_id}, {process.status()}: {' '.join(process.cmdline())[:80]}"
        stacks = _written(process_id) if files_of(process_id) else ""
    except (psutil.Error, OSError) as error:
        return f"process {process_id}: {error}"
    return f"{said}\n{stacks or _spied(process_id)}"


def _written(process_id: int) -> str:
    """Return what the process's own handler writes; "" if it writes nothing."""
    (file, *_) = files_of(process_id)
    before = len(file.read_bytes())
    os.kill(process_id, SIGNAL)
    seen, give_up = before, time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < give_up:
        time.sleep(POLL_SECONDS)
        size = len(file.read_bytes())
        if size == seen > before:  # it has ended
            break
        seen = size
    return file.read_bytes()[before:].decode(errors="replace")


def _spied(process_id: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return "no stacks: it does not answer a signal, and py-spy is not installed"
    command = [spy, "dump", "--nonblocking", "--pid", str(process_id)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no stacks: py-spy took more than {SPY_SECONDS:.0f} s"
    return done.stdout or f"no stacks: {done.stderr.strip()}"
