"""What a run would leave behind: Ray's session, and shared memory."""

import errno
import mmap
import os
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from verl_gdpo.tools.run import processes
from verl_gdpo.tools.run.processes import end, locked, remove_session, shared_by


def test_ray_keeps_no_session_of_the_driver(tmp_path, monkeypatch):
    """Another one stays, and one of an earlier process of this number: a cluster may run in it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    earlier, own, other = (
        tmp_path / "ray" / f"session_2026-11-22_{name}"
        for name in ("09-59-59_1_77", "10-00-00_1_77", "10-00-00_1_177")
    )
    for session in (earlier, own, other):
        (session / "logs").mkdir(parents=True)
    latest = tmp_path / "ray" / "session_latest"
    latest.symlink_to(other)
    remove_session(78, "2026-11-22_10-00-00")
    assert latest.exists()
    latest.unlink()
    latest.symlink_to(own)
    remove_session(77, "2026-11-22_10-00-00")
    assert earlier.exists() and other.exists() and not own.exists() and not latest.is_symlink()


SHARER = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(create=True, size=4096)
lock = multiprocessing.get_context("spawn").Lock()
# as where Ray kills the tracker with the process that made it
resource_tracker.unregister(made._name, "shared_memory")
print(made.name, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("has_ended", [False, True])
def test_shared_memory_of_a_killed_process_is_removed(has_ended):
    """Also of one that had ended before, as Ray kills its own; not that of others."""
    others = shared_memory.SharedMemory(create=True, size=4096)
    command = [sys.executable, "-c", SHARER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sharer:
        segment = Path("/dev/shm") / sharer.stdout.readline().strip()
        process = psutil.Process(sharer.pid)
        segments = shared_by([process])
        assert segment in segments and any(each.name.startswith("sem.") for each in segments)
        if has_ended:
            process.kill()
            sharer.wait()
        assert segment.exists()
        end(lambda: [] if sharer.poll() is not None else [process], segments if has_ended else ())
    assert not segment.exists() and Path("/dev/shm", others.name).exists()
    others.close()
    others.unlink()


def test_shared_memory_is_found_beside_a_file_whose_name_is_no_text():
    """As of a file system whose names have another encoding."""
    made = shared_memory.SharedMemory(create=True, size=4096)
    name = os.path.join(b"/dev/shm", b"verl_gdpo_\xff_%d" % os.getpid())
    with open(name, "w+b") as file:
        os.unlink(name)
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            assert Path("/dev/shm", made.name) in shared_by([psutil.Process()])
    made.close()
    made.unlink()


def test_a_file_system_without_locks_refuses_no_run(tmp_path, monkeypatch, capfd):
    """What else is wrong with the disk is raised as before."""

    def fails_with(code):
        flock = Mock(side_effect=OSError(code, os.strerror(code)))
        monkeypatch.setattr(processes.fcntl, "flock", flock)

    path = tmp_path / "lock"
    for code in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
        fails_with(code)
        with locked(path, f"the run folder {tmp_path}"):
            assert path.read_text() == f"{os.getpid()}\n"
        said = capfd.readouterr().err
        assert said.startswith(f"WARNING: {path} cannot be locked: ")
        assert f"the run folder {tmp_path}" in said
    fails_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output error"), locked(path, "the run folder"):
        pass
