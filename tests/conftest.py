"""Which tests may run at the same time, and what makes many of them faster."""

import gc
import os
import subprocess
import sys

import pytest
import yaml

from verl_gdpo.run.forking import fork_server

# OmegaConf's loader extends this class, and a quarter of the time of a composition is parsing in
# Python; the tests compose verl's configuration some hundred times
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

gc.disable()  # until the tests are collected: what they import stays


def pytest_collection_finish():
    gc.freeze()  # else each collection would look through all that verl imports
    gc.enable()


# tests of one worker, one after the other, by what they share
SHARED = {
    # two starts of verl at a time would starve each other on two cores
    "verl": ("test_faults.py", "test_run_tool_rl.py", "test_e2e.py"),
    "forking_python": (
        *("test_plugin.py", "cpu/test_engine.py", "test_other_trainers.py"),
        *("test_check_parts.py", "test_fused_kernels.py"),
    ),
}
# these start first, so that no worker is left with a long one at the end
LONG = (*SHARED["verl"], "test_mixed_tasks.py", "test_check.py", "test_adding_a_task.py")


def pytest_collection_modifyitems(items):
    def place(item):
        name = item.path.name
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which nox does without
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            if "hostile/" in file:
                return "hostile"  # they share one session of Ray
            return next((what for what, files in SHARED.items() if file.endswith(files)), file)

    config.option.loadscopereorder = False
    return FilesTogether(config, log)


@pytest.fixture(scope="session")
def forking_python(tmp_path_factory):
    """What takes the place of `python -W ignore` before a script or -m.

    The process is forked from one that has imported torch and transformers, but not verl, as in a
    run without a GPU. This saves five seconds of each.
    """
    verl, environment = [sys.executable, "-m", "verl"], {**os.environ, "VERL_PLATFORM": "cpu"}
    log = tmp_path_factory.mktemp("forking") / "log"
    with log.open("ab") as file, fork_server(verl, environment, file) as interpreter:
        yield [*interpreter, "-W", "ignore"]


@pytest.fixture
def run_forked(forking_python, tmp_path):
    """(code, environment) -> the completed process that has run the code."""

    def run(code, environment):
        (tmp_path / "script.py").write_text(code)
        return subprocess.run(
            [*forking_python, tmp_path / "script.py"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run
