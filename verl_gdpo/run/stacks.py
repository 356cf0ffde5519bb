"""Reads the stacks of other processes of a run, also of those that hang.

A process that loads the plugin writes them itself: see `verl_gdpo/stacks.py`. One that is stopped
does not get a signal: py-spy reads its stacks, where it is installed and may read them.

Relies on Ray 2: the function `METHOD` calls the methods of actors.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from verl_gdpo.stacks import SIGNAL, files_of

METHOD = "actor_method_executor"
NO_ANSWER = "it does not answer a signal"
WRITTEN_SECONDS, SPY_SECONDS = 3.0, 20.0  # the longest time to wait for either
POLL_SECONDS = 0.1


def write_stacks(processes: Iterable[psutil.Process], file: Path) -> list[str]:
    """Write the stacks of processes into a file.

    Returns:
        The first line of each process that runs a method for Ray, is stopped, or does not answer.
    """
    stacks = [stacks_of(process.pid) for process in processes]
    with suppress(OSError):  # of a full disk
        file.write_text("\n\n".join(stacks) + "\n")
    signs = (METHOD, NO_ANSWER, f", {psutil.STATUS_STOPPED}: ")
    return [text.partition("\n")[0] for text in stacks if any(sign in text for sign in signs)]


def stacks_of(process_id: int) -> str:
    """Return the state of a process on this machine and the stacks of its threads, or why not."""
    try:
        process = psutil.Process(process_id)
        command = " ".join(" ".join(process.cmdline()).split())[:80] or process.name()
        title = f"process {process_id}, {process.status()}: {command}"
        if not files_of(process_id):
            return f"{title}\nno stacks: it does not load verl-gdpo"
        stacks = _written(process_id) or f"{NO_ANSWER}\n{_spied(process_id)}"
    except (psutil.Error, OSError) as error:
        return f"process {process_id}: {error}"
    return f"{title}\n{stacks}"


def _written(process_id: int) -> str:
    """Return what the process's own handler writes; "" if it writes nothing."""
    (file, *_) = files_of(process_id)
    before = len(file.read_bytes())
    os.kill(process_id, SIGNAL)
    last, give_up = before, time.monotonic() + WRITTEN_SECONDS
    while time.monotonic() < give_up:
        time.sleep(POLL_SECONDS)
        size = len(file.read_bytes())
        if size == last > before:  # it has ended
            break
        last = size
    return file.read_bytes()[before:].decode(errors="replace")


def _spied(process_id: int) -> str:
    spy = shutil.which("py-spy")
    if spy is None:
        return "no stacks: py-spy is not installed"
    command = [spy, "dump", "--nonblocking", "--pid", str(process_id)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPY_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no stacks: py-spy took more than {SPY_SECONDS:.0f} s"
    return done.stdout or f"no stacks: {done.stderr.strip()}"
