"""Tells `pytest -n` which tests may run at the same time: only one run of verl at any time.

It also lets PyYAML parse with its C library: in pure Python, verl's files are a quarter of the time
that a composition takes, and the tests compose some hundred.
"""

import pytest
import yaml

yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # what OmegaConf's loader extends

# a start of verl is one import after the other, and fails on a machine that others keep busy
RUN_VERL = ("test_e2e.py", "test_faults.py", "test_script.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in RUN_VERL)  # the longest part starts first


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which nox does without
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class VerlInOneWorker(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0]
            return "verl" if file.endswith(RUN_VERL) else file

    config.option.loadscopereorder = False
    return VerlInOneWorker(config, log)
