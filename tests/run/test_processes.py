"""The lock of a run's folder, and what Ray leaves outside of it."""

import errno
import subprocess
import sys

import pytest

from verl_gdpo.run.processes import BusyError, clear_sessions, locked

SINCE = "2026-11-22_10-00-00"


def session(folder, process, time="10-00-00"):
    made = folder / f"session_2026-11-22_{time}_000001_{process}"
    (made / "logs").mkdir(parents=True)
    (made / "logs" / "raylet.out").write_text("said\n")
    (made / "sockets").mkdir()
    return made


@pytest.mark.parametrize("variable", ["TMPDIR", "RAY_TMPDIR"])
@pytest.mark.parametrize("failed", [False, True])
def test_the_sessions_of_the_driver_alone(tmp_path, monkeypatch, variable, failed):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv(variable, f"{tmp_path}/tmp")
    ray, run = tmp_path / "tmp" / "ray", tmp_path / "run"
    run.mkdir()
    own, other = session(ray, 77), session(ray, 177)
    (ray / "session_latest").symlink_to(own)
    clear_sessions(77, SINCE, ["python"], run if failed else None)
    assert [*ray.iterdir()] == [other] and (other / "logs" / "raylet.out").exists()
    kept = run / "ray_logs" / own.name / "raylet.out"
    assert kept.exists() == failed


@pytest.mark.parametrize("quote", ["", "'"])
def test_in_the_folder_that_the_command_names(tmp_path, quote):
    session(tmp_path, 77)
    key = f"+ray_kwargs.ray_init._temp_dir={quote}{tmp_path}{quote}"
    clear_sessions(77, SINCE, ["python", "-m", "x", key], None)
    assert not [*tmp_path.iterdir()]


def test_a_session_of_an_earlier_process_of_this_number_stays(tmp_path, monkeypatch):
    """A cluster has the number of `ray start`, which has ended."""
    earlier, own = session(tmp_path / "ray", 77, "09-59-59"), session(tmp_path / "ray", 77)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    clear_sessions(77, SINCE, [], None)
    assert earlier.exists() and not own.exists()


def test_a_link_to_a_session_of_others_stays(tmp_path, monkeypatch):
    other = session(tmp_path / "ray", 177)
    (tmp_path / "ray" / "session_latest").symlink_to(other)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    clear_sessions(77, SINCE, [], None)
    assert (tmp_path / "ray" / "session_latest").resolve() == other


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
        with pytest.raises(BusyError, match=message), locked(path, "it"):
            pass
        waiter = hold(path)
        assert waiter.stderr.readline().decode() == f"{message}; waiting for it\n"
        holder.kill()
        assert waiter.communicate()[0] == b"held\n"


def test_a_disk_without_locks_is_named(tmp_path, monkeypatch):
    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with (
        pytest.raises(OSError, match=r"lock: its file system has no locks \(No locks available\)"),
        locked(tmp_path / "lock", "it"),
    ):
        pass
