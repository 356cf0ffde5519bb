"""The lock of a run's folder."""

import subprocess
import sys

import pytest

from verl_gdpo.run.processes import locked

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
