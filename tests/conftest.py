"""Which tests may run at the same time, what they share, and what makes many of them faster."""

import asyncio
import gc
import itertools
import os
import sys
from importlib.util import find_spec

import pytest
from preloaded import run_code

from verl_gdpo import terminal

# not in the environments of some nox sessions
if find_spec("hydra"):
    import faster_composition  # noqa: F401
if find_spec("hypothesis"):
    import numbers_of_examples  # noqa: F401

# verl starts nine processes, and Ray would starve if each of them took all cores
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray on a busy machine: its processes would wait for the other tests, and it would give up on them
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_worker_register_timeout_seconds", "240")
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")

# messages are compared as they are, and not as a long path or the terminal of a machine breaks them
terminal.WIDTH = 10**6

gc.disable()  # until the tests are collected: what they import stays


def pytest_collection_finish():
    gc.freeze()  # else each collection would look through all that verl imports
    gc.set_threshold(100_000)  # the usual 700 is reached seven times by one copy of verl's settings
    gc.enable()


# tests of one worker, one after the other, by what they share
SHARED = {
    # whatever starts Ray or a training: two starts at a time would starve each other on two cores.
    # The training has a session of its own, so it ends before the one that the others share starts
    "ray": (
        "repository/test_run_tool_rl.py",
        "repository/test_adding_a_task.py",
        "on_ray/",
        "hostile/",
    ),
    "preloaded": ("tests/test_plugin.py", "cpu/test_engine.py"),
}
# These start first, so that no worker is left with a long one at the end. The last two mostly wait,
# while the other worker has something to do
LONG = (
    *SHARED["ray"],
    "tools/test_check.py",
    "core/scoring/test_threads.py",
    "core/scoring/test_judge.py",
)


def pytest_collection_modifyitems(items):
    def place(item):
        found = [i for i, name in enumerate(LONG) if f"tests/{name}" in item.path.as_posix()]
        return found[0] if found else len(LONG)

    items.sort(key=place)
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which nox does without
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            found = [what for what, names in SHARED.items() if any(n in file for n in names)]
            return found[0] if found else file

    config.option.loadscopereorder = False
    return FilesTogether(config, log)


def uses_ray(item):
    return item is not None and any(name in item.path.as_posix() for name in SHARED["ray"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if uses_ray(item) and not uses_ray(nextitem):  # they are one after the other
        import ray

        ray.shutdown()
    return result


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    """As `terminal.WIDTH` above, for what asks the terminal."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture(autouse=True)
def own_reward_files(monkeypatch, tmp_path_factory):
    """Reward files of a test, and their folders in `sys.path`, are gone after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    newest = next(reversed(sys.modules))
    yield
    folder = str(tmp_path_factory.getbasetemp())
    # the newest come last; a set of all ten thousand would take longer than many a test
    for name in list(itertools.takewhile(lambda name: name != newest, reversed(sys.modules))):
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture(scope="session")
def ray_session():
    from ray_session import ray_session  # most workers of pytest-xdist need no Ray

    with ray_session():
        yield


@pytest.fixture
def run_forked(tmp_path):
    """(code, environment) -> the completed process that has run the code."""
    return lambda code, environment: run_code(code, environment, tmp_path)


@pytest.fixture
def event_loop():
    """For a reward manager, which takes the loop of its thread."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    yield loop
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    asyncio.set_event_loop(None)
