"""verl's workers for all cases of this folder; `stage.py` says more."""

import pytest
from stage import Stage, limit

from workshop.tiny_policy.model import make_tiny_model

START_SECONDS, CASE_SECONDS = 300, 60  # what takes longer hangs; a case takes a second


@pytest.fixture(scope="package")
def workers(ray_session, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stage")
    model = make_tiny_model(folder / "model", texts=['{"a": 1.0, "b": 0.0}'], hidden_size=8)
    with limit(START_SECONDS):
        return Stage(folder, model)


@pytest.fixture
def stage(workers):
    assert workers.is_clean, "an earlier case did not end"
    workers.is_clean = False
    with limit(CASE_SECONDS):
        yield workers
    with limit(CASE_SECONDS):
        workers.clean()
    workers.is_clean = True
