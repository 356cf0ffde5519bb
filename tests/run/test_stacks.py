"""Stacks of processes from outside: waiting, holding the interpreter, stopped."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from verl_gdpo.run import stacks

BODIES = {
    "waits": "import threading; threading.Event().wait()",
    "holds the interpreter": "import re; re.match('(a*)*b', 'a' * 60)",
}


@pytest.fixture
def started(tmp_path):
    processes = []

    def start(body, register=True):
        (tmp_path / "stuck.py").write_text(
            f"from verl_gdpo import stacks\n{'stacks.register()' if register else ''}\n"
            f"def stuck_here():\n    print(flush=True)\n    {body}\nstuck_here()\n"
        )
        process = subprocess.Popen([sys.executable, tmp_path / "stuck.py"], stdout=subprocess.PIPE)
        processes.append(process)
        process.stdout.readline()
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("what", BODIES)
def test_its_own_handler_writes_them(started, what):
    process = started(BODIES[what])
    for _ in range(2):  # each time anew
        text = stacks.stacks_of(process.pid)
        assert text.count("in stuck_here") == 1, text
        assert text.startswith(f"process {process.pid}, ")


def test_a_stopped_process_says_so(started, monkeypatch):
    process = started(BODIES["waits"])
    os.kill(process.pid, signal.SIGSTOP)
    while psutil.Process(process.pid).status() != "stopped":
        time.sleep(0.01)
    monkeypatch.setattr(stacks, "WRITTEN_SECONDS", 0.3)
    monkeypatch.setattr(stacks, "_spied", lambda _: "from py-spy")
    text = stacks.stacks_of(process.pid)
    assert text.startswith(f"process {process.pid}, stopped")
    assert text.endswith("\nfrom py-spy")


def test_without_a_handler_no_signal_is_sent(started):
    process = started(BODIES["waits"], register=False)
    assert "it does not load verl-gdpo" in stacks.stacks_of(process.pid)
    assert process.poll() is None


def test_a_process_that_is_gone(started):
    process = started("pass")
    process.wait()
    assert str(process.pid) in stacks.stacks_of(process.pid)


METHOD = """
    def actor_method_executor():
        threading.Event().wait()
    import threading; actor_method_executor()
"""


def test_processes_that_are_busy_are_named(started, tmp_path, monkeypatch):
    """One waits, one runs a method as Ray calls it, and one is stopped."""
    waits, busy, stopped = (started(body) for body in (BODIES["waits"], METHOD, BODIES["waits"]))
    stopped.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(stacks, "WRITTEN_SECONDS", 0.3)
    file = tmp_path / "hang.txt"
    processes = [psutil.Process(one.pid) for one in (waits, busy, stopped)]
    names = [line.split(",")[0] for line in stacks.write_stacks(processes, file)]
    assert names == [f"process {busy.pid}", f"process {stopped.pid}"]
    assert file.read_text().count("in stuck_here") == 2
    processes += [psutil.Process()]
    assert stacks.write_stacks(processes[:1], tmp_path / "no" / "folder.txt") == []
