"""The tests of our hooks, on verl with a pull request that is open laid over it.

Each overlay is written here as far as it matters to us: what it moves, renames or adds. It changes
a copy of the installed verl, in which the tests of the hooks that it could break are run. In the
session `verl` of nox, that is another verl, such as a checkout of its main branch:

    nox -s verl -- FOLDER tests/slow/overlays.py
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import verl
from played_past_ours import EMPTY, KINDS, WITHOUT_GDPO, played, trained
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


def validation_in_passes(folder):
    """8113: a validation has several passes, each with sources and a folder for dumps of its own.

    verl's function makes one of them, and is called once for each.
    """
    trainer = folder / "trainer" / "ppo" / "v1" / "trainer_base.py"
    replaced(
        trainer,
        "    def _validate(self) -> dict[str, float]:\n",
        "    def _validate(self) -> dict[str, float]:\n"
        "        metrics = {}\n"
        '        for name in ("greedy", "sampled"):\n'
        "            metrics.update(self._validate_pass(name))\n"
        "        return metrics\n\n"
        "    def _validate_pass(self, name) -> dict[str, float]:\n",
    )
    replaced(
        trainer,
        "        # logger to wandb\n",
        '        data_sources = [f"{source}_{name}" for source in data_sources]\n'
        "        # logger to wandb\n",
    )
    text = trainer.read_text()
    # verl 0.9.1 has it, and its main of August has not.
    if "expected_acc_counts[" in text:
        replaced(
            trainer,
            "expected_acc_counts[(str(data_source), str(uid))]",
            'expected_acc_counts[(f"{data_source}_{name}", str(uid))]',
        )
    replaced(
        trainer,
        '        val_data_dir = self.config.trainer.get("validation_data_dir", None)\n'
        "        if val_data_dir:\n",
        '        val_data_dir = self.config.trainer.get("validation_data_dir", None)\n'
        "        if val_data_dir:\n"
        "            val_data_dir = os.path.join(val_data_dir, name)\n",
    )


def empty_groups_fail(folder):
    """8024: a group of which no session has an output ends as `failure`."""
    loops = folder / "trainer" / "ppo" / "v1" / "agent_loop_tq.py"
    replaced(
        loops,
        "    return [result for result in results if isinstance(result, BaseException)]\n",
        "    errors = [result for result in results if isinstance(result, BaseException)]\n"
        "    if not errors and not any(results):\n"
        '        return [RuntimeError("no session has an output")]\n'
        "    return errors\n",
    )
    # Whether a session has an output, it returns.
    replaced(
        loops,
        '            partition_id="train" if not validate else "val",\n        )\n',
        '            partition_id="train" if not validate else "val",\n        )\n'
        "        return True\n",
    )


def legacy_alone(folder):
    """The branch neo: neither V1 nor the package of TransferQueue."""
    shutil.rmtree(folder / "trainer" / "ppo" / "v1")
    package = folder.parent / "transfer_queue"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('not of this branch')\n")


def overlaid(tmp_path, overlay):
    """The environment of a process whose verl is a copy with this overlay."""
    source = Path(verl.__file__).parent
    shutil.copytree(source, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    overlay(tmp_path / "verl")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def nothing(folder):
    """The verl by itself."""


@pytest.mark.parametrize(
    ("overlay", "files"),
    [
        (
            nothing,
            [
                "test_agent_loop.py",
                "test_estimator.py",
                "test_legacy.py",
                "test_legacy_other_trainers.py",
                "test_replay_buffer.py",
                "test_trainer.py",
            ],
        ),
        (
            moved_functions,
            ["test_legacy.py", "test_legacy_other_trainers.py", "test_trainer.py"],
        ),
        (score_that_knows_validation, ["test_agent_loop.py"]),
        (columns_for_every_estimator, ["test_estimator.py", "test_legacy.py"]),
        (empty_groups_fail, ["test_agent_loop.py", "test_replay_buffer.py"]),
        (legacy_alone, ["test_legacy.py", "test_estimator.py"]),
    ],
    ids=["none", "7237", "7217", "7473", "8024", "neo"],
)
def test_the_hooks_work_with_it(tmp_path, overlay, files):
    env = overlaid(tmp_path, overlay)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    tests = [f"{HOOKS}/{file}" for file in files]
    done = subprocess.run([*command, *tests], cwd=REPO, env=env, capture_output=True, text=True)
    print(done.stdout[-200:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert " passed" in done.stdout


def test_a_validation_in_several_passes(tmp_path):
    """Each has its own metrics, and its own dump."""
    env = overlaid(tmp_path, validation_in_passes)
    (run,) = played([{"kind": "v1"}], tmp_path, env)
    names = {name for name in run["validated"] if "/even/mean@4" in name}
    assert names == {f"val-aux/d_{each}/even/mean@4" for each in ("greedy", "sampled")}
    assert run["validation_dumps"] == {"greedy/7.jsonl": 8, "sampled/7.jsonl": 8}
    assert run["warned"] == []


@pytest.mark.parametrize(
    "overlay",
    [
        nothing,
        moved_functions,
        score_that_knows_validation,
        columns_for_every_estimator,
        empty_groups_fail,
    ],
    ids=["none", "7237", "7217", "7473", "8024"],
)
def test_no_run_goes_past_ours(tmp_path, overlay):
    """A scripted step and validation of each trainer; without gdpo, verl's own functions work."""
    env = overlaid(tmp_path, overlay)
    cases = [{"kind": kind} for kind in KINDS]
    # Of one prompt, no session has an output.
    cases.append({"kind": "v1", "prompts": EMPTY})
    cases += [{"kind": kind, "overrides": WITHOUT_GDPO} for kind in KINDS]
    for run in played(cases, tmp_path, env):
        assert run.get("raised") is None, run
        assert [line for line in run["warned"] if "go past ours" in line] == [], run
        if run.get("overrides"):
            assert len(run["trained"]) == 8 and run["metrics"] == []
        else:
            assert run["trained"] == trained()
