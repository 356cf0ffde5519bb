"""A run of `workshop/experiments/trainer` with verl: `nox -s experiment`, a minute or two."""

import json

import pytest

from workshop.experiments.trainer import drive, on_cpu, policy, results, task
from workshop.experiments.trainer.settings import Run


def test_a_run_is_trained(tmp_path, monkeypatch):
    """Two steps with verl's trainer, of a seed that the comparison does not use."""
    monkeypatch.setattr(policy, "STEPS", 100)
    command_of = on_cpu.command
    monkeypatch.setattr(
        on_cpu, "command", lambda *of: [*command_of(*of), "trainer.total_training_steps=2"]
    )
    drive.drive([Run("20_to_1", "grpo_rescaled", 100)], on_cpu.train, tmp_path, tmp_path / "data")
    [path] = (tmp_path / "data").iterdir()
    found = results.read(Run("20_to_1", "grpo_rescaled", 100), tmp_path / "data")
    assert found is not None, path.read_text()
    assert len(found.shares["small"]) == 2
    rows = (tmp_path / "runs/20_to_1-grpo_rescaled-100_1/rollouts/1.jsonl").read_text()
    scored = [json.loads(line) for line in rows.splitlines()]
    assert len(scored) == 16 * 8
    for row in scored:
        is_met = {r: task.met(row["output"], r, json.loads(row["gts"])[r]) for r in task.OF_REWARD}
        assert row["rewards"]["format"] == 20 * is_met["format"]
        assert row["rewards"]["small_met"] == is_met["answer"]
        # what GRPO trains on
        assert row["score"] == pytest.approx(is_met["format"] + is_met["answer"])
    assert found.shares["small"][0] == pytest.approx(
        sum(row["rewards"]["small_met"] for row in scored) / len(scored), abs=1e-5
    )
