"""One session of Ray with verl's workers for all cases of this folder; `stage.py` says more."""

import os
from pathlib import Path

import pytest
import ray
import stage as stage_module
from stage import Stage, limit
from start_verl import ray_folder

from verl_gdpo.cpu.tiny_model import make_tiny_model

START_SECONDS, CASE_SECONDS = 300, 60  # what takes longer hangs; a case takes a second
HELP = Path(stage_module.__file__).parent


@pytest.fixture(scope="package")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    model = make_tiny_model(folder / "model", texts=['{"a": 1.0, "b": 0.0}'], hidden_size=8)
    path = os.pathsep.join([str(HELP), *filter(None, [os.getenv("PYTHONPATH")])])
    with ray_folder() as ray_dir:
        ray.init(
            "local",  # not a cluster that somebody else started on this machine
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": path, "VERL_PLATFORM": "cpu"}},
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
