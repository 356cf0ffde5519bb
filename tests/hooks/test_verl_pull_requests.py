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

PATCHES = REPO / "contrib" / "verl_pull_requests"


def apply(name, folder, *options):
    done = subprocess.run(
        ["git", "apply", *options, str(PATCHES / name)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_gdpo_on_v1(tmp_path, whole):
    """Its test passes with the patch, and fails where verl's own code stays."""
    shutil.copytree(Path(verl.__file__).parent, tmp_path / "verl")
    apply("gdpo_on_v1.patch", tmp_path, *([] if whole else ["--include=tests/*"]))
    (test,) = (tmp_path / "tests").rglob("test_*.py")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    pytest_ = (sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    done = subprocess.run([*pytest_, str(test)], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode == 0) == whole, done.stdout.decode()[-2000:]


def test_external_estimators(tmp_path):
    apply("external_estimators.patch", tmp_path, "--include=docs/advance/*")
    (page,) = tmp_path.rglob("*.md")
    names = {}
    exec(re.search(r"```python\n(.*?)```", page.read_text(), re.S)[1], names)
    function = ADV_ESTIMATOR_REGISTRY.pop("centered")
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    scores = mask * torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 0.0]])
    advantages, _ = function(scores, mask, ["a", "a", "b"])
    assert advantages.tolist() == [[-1.0, -1.0], [1.0, 0.0], [0.0, 0.0]]
