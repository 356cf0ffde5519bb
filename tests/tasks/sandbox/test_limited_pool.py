"""Processes within limits: what they reply, what ends them, and what never stays behind."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from repository import REPO

from verl_gdpo.tasks.sandbox import limited_pool
from verl_gdpo.tasks.sandbox.limited_pool import LimitedPool

PROGRAM = """
import os, time
def prepare():
    print("no reply")
def answer(say, task, number=0):
    if task == "half":
        say(number / 2)
        time.sleep(60)
    if task == "freeze":
        9 ** 9 ** 9 ** 9
    if task == "fill":
        return [0] * (1 << 30)
    if task == "recurse":
        return answer(say, task)
    if task == "end":
        os._exit(3)
    print("no reply")
    return [task, number]
"""


@pytest.fixture
def program(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


@pytest.fixture
def pool(program):
    made = LimitedPool(str(program), 0.3, 1 << 30, wall_s=5)
    yield made
    made.forget()


def ask(pool, *request):
    return pool.ask(json.dumps(request), "a test")


def processes(pool):
    return [one.process for one in pool._idle.queue if one is not None]


@pytest.mark.parametrize("task", ["freeze", "fill", "recurse"])
def test_what_needs_too_much_ends_its_process_and_the_next_request_has_another(pool, task):
    assert ask(pool, "a", 1) == ([["a", 1]], True)
    (process,) = processes(pool)
    assert ask(pool, task) == ([], False)
    assert process.returncode is not None and processes(pool) == []
    assert ask(pool, "b", 2) == ([["b", 2]], True)
    assert len(processes(pool)) == 1


def test_what_was_said_before_the_end_is_there(program):
    pool = LimitedPool(str(program), 9, 1 << 30, wall_s=1)
    assert ask(pool, "half", 5) == ([2.5], False)


def test_threads_share_few_processes(pool):
    started = threading.Barrier(8)

    def of_thread(number):
        started.wait(60)
        return ask(pool, "a", number)

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(of_thread, range(8))] == [([["a", n]], True) for n in range(8)]
    assert 1 <= len(processes(pool)) <= 2


def test_no_thread_waits_while_others_take_their_turns(pool, monkeypatch):
    class Quick:
        def __init__(self, *_):
            self.process = None

        def ask(self, request, replies):
            time.sleep(0.0005)  # others run
            return True

    monkeypatch.setattr(limited_pool, "_Process", Quick)
    done = []
    with ThreadPoolExecutor(8) as threads:
        [*threads.map(lambda n: (ask(pool), done.append(n)), range(400))]
    # without turns, some of the first 8 are among the last
    assert max(place - n for place, n in enumerate(done)) < 200


def test_one_that_is_killed_from_outside_is_replaced(pool):
    ask(pool, "a")
    (process,) = processes(pool)
    process.kill()
    process.wait()
    assert ask(pool, "b") == ([["b", 0]], True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PROGRAM, "a test: two processes in a row ended with [3, 3]; expected an answer"),
        ("def prepare(): raise OSError('no disk')\nanswer = 1", "can be started: OSError: no disk"),
        ("import os\nos._exit(5)", "a test: no process for it can be started: it ended with 5"),
    ],
)
def test_processes_that_cannot_work_raise(pool, program, text, words):
    program.write_text(text)
    for _ in range(3):  # no place in the pool is lost
        with pytest.raises(OSError, match=re.escape(words)):
            ask(pool, "end")


def test_an_interrupt_leaves_no_reply_for_the_next_request(pool, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    ask(pool, "a")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(limited_pool._Process, "_read", interrupted)
        ask(pool, "b")
    assert ask(pool, "c") == ([["c", 0]], True)


def test_a_process_ends_with_its_pool(program):
    pool = LimitedPool(str(program), 9, 1 << 30)
    ask(pool, "a")
    (process,) = processes(pool)
    del pool
    gc.collect()
    assert process.returncode is not None


def python(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


STARTED = """
import os, sys
from verl_gdpo.tasks.sandbox.limited_pool import LimitedPool
pool = LimitedPool(sys.argv[1], 9, 1 << 30)
def ask():
    assert pool.ask('["a"]', "a test")[1]
    print([one.process.pid for one in pool._idle.queue if one][0], flush=True)
ask()
"""


@pytest.mark.parametrize("end", ["killed", "ended"])
def test_a_process_ends_with_its_parent(program, end):
    parent = python(STARTED + "input()", program)
    process = psutil.Process(int(parent.stdout.readline()))
    if end == "killed":
        parent.kill()
    parent.communicate("\n")
    assert psutil.wait_procs([process], timeout=60)[1] == []
    assert end == "killed" or parent.returncode == 0


def test_a_thread_that_nobody_waits_for_holds_up_no_end(program):
    code = """
import threading, time
process = next(one for one in pool._idle.queue if one)
threading.Thread(target=pool.ask, args=('["half"]', "a test"), daemon=True).start()
while process in pool._idle.queue:
    time.sleep(0.01)
"""
    parent = python(STARTED + code, program)
    process = psutil.Process(int(parent.stdout.readline()))
    parent.communicate(timeout=30)
    assert parent.returncode == 0
    assert psutil.wait_procs([process], timeout=30)[1] == []


def test_a_forked_child_has_processes_of_its_own(program):
    code = "if os.fork() == 0:\n    ask()\n    pool.forget()\n    os._exit(0)\nos.wait()\nask()\n"
    parent = python(STARTED + code, program)
    first, of_child, again = parent.communicate()[0].split()
    assert parent.returncode == 0 and first == again != of_child


CLOCKS = """
import signal
def answer(say):
    return [signal.getitimer(clock)[0] > 0 for clock in (signal.ITIMER_PROF, signal.ITIMER_REAL)]
"""


def test_no_clock_runs_between_requests(program):
    code = """if 1:
        import runpy, sys
        from verl_gdpo.tasks.sandbox.limited_pool import work
        def lines():
            yield '[]'
            print(runpy.run_path(sys.argv[1])["answer"](None), file=sys.stderr)
        sys.stdin = lines()
        work(sys.argv[1], 9, 300, 1 << 30)
    """
    program.write_text(CLOCKS)
    command = [sys.executable, "-c", code, program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ('""\n[[true, true], true]\n', "[False, False]\n")
