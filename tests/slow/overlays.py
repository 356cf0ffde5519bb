"""The tests of our hooks, on verl with a pull request that is open laid over it.

Each overlay is written here as far as it matters to us: what it moves, renames or adds. It changes
a copy of the installed verl, in which the tests of the hooks that it could break are run.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import verl
from repository import REPO

HOOKS = "tests/core/hooks"


def replaced(file, old, new):
    text = file.read_text()
    assert old in text, f"{file}: {old}"
    file.write_text(text.replace(old, new))


def moved_functions(folder):
    """7237: functions of the legacy trainer move to `trainer_utils`, and are imported back."""
    trainer = folder / "trainer" / "ppo" / "ray_trainer.py"
    names = ["apply_kl_penalty", "compute_advantage", "compute_response_mask"]
    line = f"from verl.trainer.ppo.trainer_utils import {', '.join(names)}\n"
    text = trainer.read_text()
    moved = """
from typing import Optional

import torch

from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import AdvantageEstimator
from verl.utils.torch_functional import masked_mean

"""
    for name in names:
        function = re.search(rf"^def {name}\(.*?(?=^(?:def|class|@))", text, re.M | re.S)[0]
        text = text.replace(function, "")
        moved += f"\n{function}"
    imported = "from verl.trainer.ppo.reward import extract_reward\n"
    trainer.write_text(text.replace(imported, imported + line))
    trainer.with_name("trainer_utils.py").write_text(moved)
    replaced(
        folder / "trainer" / "ppo" / "v1" / "utils.py",
        "from verl.trainer.ppo.ray_trainer import compute_advantage",
        "from verl.trainer.ppo.trainer_utils import compute_advantage",
    )
    replaced(
        folder / "experimental" / "separation" / "ray_trainer.py",
        f"from verl.trainer.ppo.ray_trainer import RayPPOTrainer, {', '.join(names)}\n",
        f"from verl.trainer.ppo.ray_trainer import RayPPOTrainer\n{line}",
    )


def score_that_knows_validation(folder):
    """7217: `_compute_score` takes whether the session is one of a validation."""
    for file in ("experimental/agent_loop/agent_loop.py", "trainer/ppo/v1/agent_loop_tq.py"):
        text = (folder / file).read_text()
        text = text.replace(
            "_compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict)",
            "_compute_score(self, outputs: list[AgentLoopOutput], kwargs: dict, validate: bool)",
        )
        text = re.sub(r"(self\._compute_score\(.*kwargs=kwargs)\)", r"\1, validate=validate)", text)
        assert "kwargs=kwargs, validate=validate" in text
        (folder / file).write_text(text)


def columns_for_every_estimator(folder):
    """7473: every estimator gets `non_tensor_batch`."""
    replaced(
        folder / "trainer" / "ppo" / "ray_trainer.py",
        '        if "uid" in data.non_tensor_batch:  # optional\n',
        '        adv_kwargs["non_tensor_batch"] = data.non_tensor_batch\n'
        '        if "uid" in data.non_tensor_batch:  # optional\n',
    )


@pytest.mark.parametrize(
    ("overlay", "files"),
    [
        (
            moved_functions,
            ["test_legacy.py", "test_legacy_other_trainers.py", "test_trainer.py"],
        ),
        (score_that_knows_validation, ["test_agent_loop.py"]),
        (columns_for_every_estimator, ["test_estimator.py", "test_legacy.py"]),
    ],
    ids=["7237", "7217", "7473"],
)
def test_the_hooks_work_with_it(tmp_path, overlay, files):
    shutil.copytree(
        Path(verl.__file__).parent,
        tmp_path / "verl",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    overlay(tmp_path / "verl")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    tests = [f"{HOOKS}/{file}" for file in files]
    done = subprocess.run([*command, *tests], cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout
