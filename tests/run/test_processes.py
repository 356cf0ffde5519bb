"""The lock of a run's folder."""

import subprocess
import sys

import pytest

from verl_gdpo.run.processes import TRACKER_SECONDS, end, locked, remove_session


def test_ray_keeps_no_session_of_the_driver(tmp_path, monkeypatch):
    """Another one stays, and one of an earlier process of this number: a cluster may run in it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    earlier, own, other = (
        tmp_path / "ray" / f"session_2026-11-22_{name}"
        for name in ("09-59-59_1_77", "10-00-00_1_77", "10-00-00_1_177")
    )
    for session in (earlier, own, other):
        (session / "logs").mkdir(parents=True)
    remove_session(77, "2026-11-22_10-00-00")
    assert earlier.exists() and other.exists() and not own.exists()


class Dying:
    """A process that is gone some looks after its SIGKILL."""

    def __init__(self, command, looks):
        self.command, self.looks, self.killed_at = command, looks, None

    def cmdline(self):
        return self.command.split()

    def kill(self):
        self.killed_at = now[0] if self.killed_at is None else self.killed_at


now = [0.0]


def test_a_tracker_has_time_after_the_last_of_the_others(monkeypatch):
    """Those that hold much memory take seconds to go, and the tracker removes what they shared."""
    slow = Dying("ray::vLLM", looks=6)
    tracker = Dying("python -c from multiprocessing.resource_tracker import main;main(5)", looks=1)

    def find():
        now[0] += 1.0
        alive = [each for each in (slow, tracker) if each.killed_at is None or each.looks > 0]
        for each in alive:
            each.looks -= each.killed_at is not None
        return alive

    now[0] = 0.0
    monkeypatch.setattr("verl_gdpo.run.processes.time.monotonic", lambda: now[0])
    monkeypatch.setattr("psutil.wait_procs", lambda *_, **__: None)
    end(find)
    assert slow.killed_at == 1 and tracker.killed_at > 6 + TRACKER_SECONDS


HOLDER = """
import sys
from pathlib import Path
from verl_gdpo.run.processes import locked
with locked(Path(sys.argv[1]), "it", wait=True):
    print("held", flush=True)
    sys.stdin.read()
"""


def hold(path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", HOLDER, path], **pipes)


def test_a_lock_is_refused_or_waited_for(tmp_path):
    path = tmp_path / "lock"
    with hold(path) as holder:
        assert holder.stdout.readline() == b"held\n"
        message = f"it is in use by process {holder.pid}"
        with pytest.raises(RuntimeError, match=message), locked(path, "it"):
            pass
        waiter = hold(path)
        assert waiter.stderr.readline().decode() == f"{message}; waiting for it\n"
        holder.kill()
        assert waiter.communicate()[0] == b"held\n"
