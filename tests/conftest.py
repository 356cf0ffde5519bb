"""Which tests may run at the same time, and what makes many of them faster."""

import gc

import pytest
import yaml
from preloaded import run_code

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
    "preloaded": ("test_plugin.py", "cpu/test_engine.py"),
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


@pytest.fixture
def run_forked(tmp_path):
    """(code, environment) -> the completed process that has run the code."""
    return lambda code, environment: run_code(code, environment, tmp_path)
