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
    "verl": ("test_faults.py", "test_script.py", "test_e2e.py"),
    "forked": ("test_plugin.py", "test_cpu_engine.py"),
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
            return next((what for what, files in SHARED.items() if file.endswith(files)), file)

    config.option.loadscopereorder = False
    return FilesTogether(config, log)


@pytest.fixture(scope="session")
def run_forked(tmp_path_factory):
    """(code, environment) -> what `python -W ignore` makes of it, as a completed process.

    The process is forked from one that has imported torch and transformers, but not verl, as in a
    run without a GPU. This saves five seconds of each.
    """
    folder = tmp_path_factory.mktemp("forked")
    verl = [sys.executable, "-m", "verl"]
    with (
        (folder / "log").open("ab") as log,
        fork_server(verl, {**os.environ, "VERL_PLATFORM": "cpu"}, log) as interpreter,
    ):

        def run(code, environment):
            script = folder / "script.py"
            script.write_text(code)
            command = [*interpreter, "-W", "ignore", script]
            return subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=300
            )

        yield run
