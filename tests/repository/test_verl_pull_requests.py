"""The patches that we offer verl fit the installed one, and what they bring runs there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import verl
from repository import REPO
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY


def apply(name, folder, *options):
    patch = str(REPO / "contrib" / "verl_pull_requests" / name)
    subprocess.run(["git", "apply", *options, patch], cwd=folder, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["*", "tests/*"])
def test_gdpo_on_v1(tmp_path, of):
    """Its test passes with the whole patch, and fails where verl's own code stays."""
    shutil.copytree(Path(verl.__file__).parent, tmp_path / "verl")
    apply("gdpo_on_v1.patch", tmp_path, f"--include={of}")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = (sys.executable, "-W", "ignore", "-m", "pytest", "-p", "no:cacheprovider", "tests")
    assert subprocess.run(command, cwd=tmp_path, env=env).returncode == (of != "*")


def test_external_estimators(tmp_path):
    apply("external_estimators.patch", tmp_path, "--include=docs/advance/*")
    (page,) = tmp_path.rglob("*.md")
    exec(re.search(r"```python\n(.*?)```", page.read_text(), re.S)[1], {})
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    scores = mask * torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]])
    advantages, _ = ADV_ESTIMATOR_REGISTRY.pop("centered")(scores, mask, ["a", "a", "b"])
    assert advantages.tolist() == [[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0]]
