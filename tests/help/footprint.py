"""Seconds and peak memory of a run, and what it leaves: processes, and files in /dev/shm."""

import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from processes import marked

SHARED = "/dev/shm/"


def memory(processes):
    """Bytes; what several of them share is counted once."""
    total = 0
    for process in processes:
        with suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total


def shared_files(processes):
    """The files in /dev/shm that they have open or mapped."""
    found = set()
    for process in processes:
        folder = Path("/proc", str(process.pid))
        with suppress(OSError):
            lines = (folder / "maps").read_text().splitlines()
            found |= {line.split(maxsplit=5)[-1] for line in lines}
        with suppress(OSError):
            found |= {os.readlink(file) for file in (folder / "fd").iterdir()}
    return {file for file in found if file.startswith(SHARED)}


class Footprint:
    seconds = 0.0
    peak_bytes = 0
    left = ()

    def __str__(self):
        return f"{self.seconds:.0f} s, at most {self.peak_bytes / 2**30:.2f} GiB"


@contextmanager
def footprint(variable):
    """Watch the processes with `variable` in their environment; the result is whole at the end."""
    found, ended, files = Footprint(), threading.Event(), set()

    def watch():
        while not ended.wait(2):
            processes = marked(*variable)
            found.peak_bytes = max(found.peak_bytes, memory(processes))
            files.update(shared_files(processes))

    start, thread = time.monotonic(), threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        found.seconds = time.monotonic() - start
        processes = [" ".join(one.cmdline()) for one in marked(*variable)]
        found.left = (*processes, *sorted(file for file in files if os.path.exists(file)))
