"""Ray for the tests: one session, whose start is tried again.

pytest-xdist gives all tests that start Ray or verl to one worker (`conftest.py`), so that there is
one session at a time. Ray waits 30 s for its own node, and that limit is no setting.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import ray

STARTS = 2


@contextlib.contextmanager
def ray_folder():
    """Ray's sockets need short paths."""
    folder = tempfile.mkdtemp(prefix="vg", dir="/tmp")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ray_session():
    """Ray without a GPU, whose workers import from `tests/help/` too."""
    path = [str(Path(__file__).parent), *filter(None, [os.getenv("PYTHONPATH")])]
    options = {
        "num_cpus": 16,
        "include_dashboard": False,
        "log_to_driver": False,
        "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(path), "VERL_PLATFORM": "cpu"}},
    }
    with contextlib.ExitStack() as folders:
        for start in range(1, STARTS + 1):
            folder = folders.enter_context(ray_folder())  # a start that failed leaves its files
            try:
                # "local": not a cluster that somebody else started on this machine
                ray.init("local", _temp_dir=folder, **options)
                break
            except Exception as error:
                ray.shutdown()
                if start == STARTS:
                    raise
                print(f"Ray did not start, and is started again: {error!r}")
        folders.callback(ray.shutdown)
        yield
