"""Waits for what another process does, says whether it lives, and finds those of a run."""

import contextlib
import os
import subprocess
import sys
import time

import psutil


def completed(*arguments, **options):
    """How Python with these arguments has ended, and what it has printed."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def marked(name, value):
    """The living processes with this in their environment, but for the one that asks."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_of_run = process.environ().get(name) == value and process.pid != os.getpid()
            if is_of_run and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
