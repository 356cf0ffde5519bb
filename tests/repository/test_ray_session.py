"""The start of Ray for the tests: tried again once, in a new folder."""

import os

import pytest
import ray
from ray_session import ray_session


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_start_that_fails_is_tried_again(monkeypatch, failures):
    folders, ends = [], []

    def init(*_, _temp_dir, **__):
        folders.append(_temp_dir)
        if len(folders) <= failures:
            raise RuntimeError("The current node timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ends.append("end"))
    if failures == 2:
        with pytest.raises(RuntimeError, match="timed out"), ray_session():
            pytest.fail("Ray has not started")
    else:
        with ray_session():
            assert len(ends) == failures
    assert len({*folders}) == min(failures + 1, 2)
    assert len(ends) == min(failures + 1, 2)
    assert not any(os.path.exists(folder) for folder in folders)
