"""Lets another process read the stacks of this one: `tools/run/stop_conditions.py` does so.

Each process that loads the plugin in a run of the launcher, which sets `VARIABLE`, registers a
signal on which Python's `faulthandler` writes the stacks of all threads into a file in memory,
which has no name. Only its owner can read it, through /proc, and it is gone with the process. This
works while a thread holds the interpreter for ever.
"""

import faulthandler
import os
import signal
from contextlib import suppress
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7  # no program that we know of uses it
FILE = "verl_gdpo_stacks"
# In the environment of the launcher's driver, from which Ray's processes on this machine have it.
# The launcher reads no other process.
VARIABLE = "VERL_GDPO_STACKS"


def register_if_asked() -> None:
    """Let the launcher read the stacks of this process, if it is of its run."""
    if os.environ.get(VARIABLE):
        register()


def register() -> None:
    """Let others read the stacks of this process."""
    if not files_of(os.getpid()):
        faulthandler.register(SIGNAL, file=os.memfd_create(FILE), all_threads=True)


def files_of(process_id: int) -> list[Path]:
    """Return the file in memory of a process that has registered, as its owner may read it."""
    files = []
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(OSError):
            if os.readlink(path).startswith(f"/memfd:{FILE}"):
                files.append(path)
    return files
