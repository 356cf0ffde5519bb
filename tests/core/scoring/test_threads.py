"""Reward functions that hang in their threads: who fails, what goes on, and how the run ends."""

import asyncio
import gc
import subprocess
import sys
import threading

import pytest
from reward_rows import Tokenizer, row_of
from run_config import listed

from verl_gdpo.algorithm.values import NOTES_KEY
from verl_gdpo.hooks import reward_manager
from verl_gdpo.hooks.reward_manager import GdpoRewardManager
from verl_gdpo.scoring import threads
from verl_gdpo.scoring.limits import Counter

HANGING = """
import asyncio
import contextlib
import threading
import time

LOCK = threading.Lock()
RELEASE = threading.Event()
running = []
most = 0
calls = []


@contextlib.contextmanager
def counted(solution_str):
    global most
    with LOCK:
        calls.append(solution_str)
        running.append(solution_str)
        most = max(most, len(running))
    yield
    with LOCK:
        running.remove(solution_str)


def f(solution_str):
    kind, _, seconds = solution_str.partition(" ")
    with counted(solution_str):
        if kind == "hang":
            RELEASE.wait(60)
        else:
            time.sleep(float(seconds))
    return 1.0


def awaitable(solution_str):
    async def later():
        with counted(solution_str):
            await asyncio.sleep(float(solution_str.split()[1]))
        return 1.0

    return later()


def of_group(solution_strs):
    return [f(text) for text in solution_strs]


def fails_late(solution_str):
    RELEASE.wait(60)
    raise OSError("the service is down")


def own_time_out(solution_str):
    raise TimeoutError("database did not answer in 5 s")
"""


@pytest.fixture(autouse=True)
def two_cores(monkeypatch, event_loop):
    """A counter of this process, and so many threads as on two cores."""
    monkeypatch.setattr(reward_manager, "counter_of_run", Counter)
    monkeypatch.setattr(threads, "usual_threads", lambda: 6)


class Run:
    """A manager with one function `q`, and what the function has seen."""

    def __init__(self, path, name="f", entry=(), **limits):
        path.write_text(HANGING)
        kept = {"path": str(path), "name": name, "limited": True, "on_error": "missing"}
        functions = {"q": {**kept, **dict(entry)}}
        self.manager = GdpoRewardManager(listed(functions, **limits), Tokenizer(), None)
        self.module = self.manager.functions[0].function.__globals__

    def score(self, *responses):
        """What the manager returns or raises for each response, all at once."""

        async def all_of_them():
            rows = [row_of(each, "gold", "s", uid=each) for each in responses]
            scoring = asyncio.gather(*map(self.manager.run_single, rows), return_exceptions=True)
            return await asyncio.wait_for(scoring, 60)

        return self.manager.loop.run_until_complete(all_of_them())

    def failed(self, *responses):
        """The responses whose function failed."""
        results = zip(responses, self.score(*responses), strict=True)
        return [
            response
            for response, result in results
            if result["reward_extra_info"][NOTES_KEY]["failed_q"] == 1.0
        ]

    def end(self):
        """Let all threads end, as far as the event loop knows them."""
        self.module["RELEASE"].set()

        async def until_all_have_ended():
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 60)

        self.manager.loop.run_until_complete(until_all_have_ended())


@pytest.fixture
def run(tmp_path):
    made = []

    def make(*args, **kwargs):
        made.append(Run(tmp_path / f"hanging_{len(made)}.py", *args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.mark.parametrize("name", ["f", "awaitable"])
def test_the_wait_for_a_thread_is_not_counted(run, name):
    """64 calls of .2 s in six threads: the last ones wait for about 2 s."""
    waiting = run(name, timeout=1.5)
    responses = [f"sleep 0.2{number:03}" for number in range(64)]
    assert waiting.failed(*responses) == []
    assert sorted(waiting.module["calls"]) == responses
    assert waiting.module["most"] <= (6 if name == "f" else 64)


def test_a_sample_that_hangs_fails_alone(run, caplog):
    hanging = run(timeout=1)
    hangs = [f"hang {number}" for number in range(8)]
    good = [f"sleep 0.01{number:03}" for number in range(32)]
    assert hanging.failed(*hangs, *good) == hangs
    assert len(hanging.module["calls"]) == 40
    assert hanging.module["most"] <= 8 + 6
    lines = [record.message for record in caplog.records if "cannot be ended" in record.message]
    assert len(lines) == 8
    for number, line in enumerate(lines, 1):
        assert f"; {number} of at most 64 threads" in line
    assert {line.split("prompt uid ")[1].split(",")[0] for line in lines} == {*hangs}
    assert all("function q did not return in time" in line for line in lines)
    hanging.end()
    assert hanging.module["running"] == []
    others = [f"sleep 0.02{number:03}" for number in range(32)]
    assert hanging.failed(*others) == []  # in the threads that came back


def test_what_is_raised_after_the_time_limit_is_not_logged(run, caplog):
    late = run("fails_late", timeout=0.5)
    assert late.failed("a", "b") == ["a", "b"]
    late.end()
    gc.collect()
    assert "NoAnswerError" in caplog.text
    assert "never retrieved" not in caplog.text and "service is down" not in caplog.text


def test_a_place_is_held_until_its_thread_ends(run):
    held = run(timeout=1, max_concurrent=2)
    good = [f"sleep 0.01{number:03}" for number in range(20)]
    assert held.failed("hang 0", *good) == ["hang 0"]
    assert held.module["most"] == 2
    assert held.module["running"] == ["hang 0"]
    held.end()
    assert held.module["running"] == []


def test_the_run_ends_if_all_places_are_stuck(run):
    """Also with `on_error: missing`: no sample could be scored any more."""
    stuck = run(timeout=0.5, max_concurrent=2)
    results = stuck.score("hang 0", "hang 1", *(f"sleep 0.0{number}" for number in range(20)))
    failed = [result for result in results if isinstance(result, dict)]
    assert [each["reward_extra_info"][NOTES_KEY] for each in failed] == [{"failed_q": 1.0}] * 2
    for error in results[2:]:
        assert "AllStuckError: all 2 places of reward.max_concurrent=2 are held" in str(error)
        assert "prompt uid hang 0" in str(error) and "prompt uid hang 1" in str(error)
        assert "function q" in str(error)
    assert len(stuck.module["calls"]) == 2


def test_the_run_ends_if_all_threads_are_stuck(run, monkeypatch):
    monkeypatch.setattr(threads, "MOST_STUCK", 10)
    stuck = run(timeout=0.3)
    results = stuck.score(*(f"hang {number}" for number in range(20)))
    assert sum(isinstance(result, dict) for result in results) == 10
    for error in results[10:]:
        assert "AllStuckError: all 10 threads of function q are held" in str(error)
        assert "prompt uid hang 0, " in str(error) and "and 7 more" in str(error)
    assert len(stuck.module["calls"]) == 10
    assert "threads of function q" in str(stuck.score("sleep 0.01")[0])


def test_a_group_that_hangs_fails_alone(run):
    groups = run("of_group", {"group": True}, timeout=1)
    assert groups.failed("hang 0", "sleep 0.01", "sleep 0.02") == ["hang 0"]
    assert groups.module["running"] == ["hang 0"]


@pytest.mark.parametrize("limits", [{"timeout": 60}, {"max_concurrent": 2}])
def test_a_time_out_of_the_function_itself_keeps_its_text_and_line(run, limits):
    (error,) = run("own_time_out", {"on_error": "stop"}, **limits).score("x")
    assert ": TimeoutError: database did not answer in 5 s [" in str(error)
    line = (
        HANGING.splitlines().index('    raise TimeoutError("database did not answer in 5 s")') + 1
    )
    assert f"hanging_0.py:{line}]" in str(error)


def test_threads_end_with_their_manager(run):
    before = {*threading.enumerate()}
    used = run(timeout=60)
    assert used.failed("sleep 0.01", "sleep 0.02") == []
    own = [each for each in threading.enumerate() if each.name == threads.NAME]
    own = [each for each in own if each not in before]
    assert 0 < len(own) <= 2
    used.manager._threads.clear()
    gc.collect()
    for thread in own:
        thread.join(60)
        assert not thread.is_alive()


EXIT = """
import asyncio, threading
from verl_gdpo.scoring.threads import Threads

async def run():
    thread = await Threads("s").reserve()
    started = threading.Event()
    thread.start(lambda: (started.set(), threading.Event().wait()))
    await asyncio.to_thread(started.wait)

asyncio.run(run())
print("the end")
"""


@pytest.mark.slow
def test_a_process_ends_though_a_function_hangs():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout) == (0, "the end\n"), ended.stderr
