"""One session of Ray with verl's workers for all cases of this folder; `stage.py` says more."""

import os
import shlex
from pathlib import Path

import pytest
import ray
from stage import Stage, limit
from verl_run import ray_folder

from workshop.tiny_policy.model import make_tiny_model

START_SECONDS, CASE_SECONDS = 300, 60  # what takes longer hangs; a case takes a second
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="package")
def workers(tmp_path_factory, forking_python):
    folder = tmp_path_factory.mktemp("stage")
    model = make_tiny_model(folder / "model", texts=['{"a": 1.0, "b": 0.0}'], hidden_size=8)
    path = os.pathsep.join([str(TESTS / "hostile"), *filter(None, [os.getenv("PYTHONPATH")])])
    with ray_folder() as ray_dir:
        ray.init(
            "local",  # not a cluster that somebody else started on this machine
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={
                "env_vars": {"PYTHONPATH": path, "VERL_PLATFORM": "cpu"},
                "py_executable": shlex.join(forking_python[:-2]),  # Ray has its own -W ignore
            },
            _temp_dir=ray_dir,
        )
        try:
            with limit(START_SECONDS):
                started = Stage(folder, model)
            yield started
        finally:
            ray.shutdown()


@pytest.fixture
def stage(workers):
    assert workers.is_clean, "an earlier case did not end"
    workers.is_clean = False
    with limit(CASE_SECONDS):
        yield workers
    with limit(CASE_SECONDS):
        workers.clean()
    workers.is_clean = True
