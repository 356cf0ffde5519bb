"""verl's trainers with their own main module, in parts; `slow/trainers.py` runs them as a whole.

These tests run on the installed verl, and with `nox -s verl` on another one.
"""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import oracle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from stand_in import stand_in
from verl.trainer import main_ppo
from verl_batch import GROUPS, REWARDS, batch, verl_config
from verls_run import run_with_plugins

from verl_gdpo.hooks import before_training, legacy


def test_one_step_off_policy_from_rewards_to_metrics():
    """Through its own methods; `slow/trainers.py` runs all of it, on one version of verl."""
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    trainer = object.__new__(OneStepOffRayTrainer)
    trainer.config = verl_config()
    trainer.use_rm = trainer.use_critic = False
    trainer.metrics, trainer.timing_raw = {}, {"step": 1.0}
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    values = np.array(REWARDS)
    columns = {"correctness": values[:, 0], "format": values[:, 1], "score": values.sum(1)}
    data = batch(columns, reward_extra_keys=list(columns), global_token_num=[8] * len(values))
    data.batch["rm_scores"] = data.batch.pop("token_level_rewards")
    for key in ("prompts", "responses"):
        data.batch[key] = data.batch["response_mask"].clone()
    data.batch["attention_mask"] = data.batch["response_mask"].repeat(1, 2)
    # as its constructor and its `fit` do
    trainer.global_steps, trainer.train_dataset, trainer.val_dataset = 1, None, None
    stand_in(legacy.create_dataloader, lambda self: None)(trainer)
    with legacy._fitting(trainer):
        data = trainer._fit_compute_advantage(trainer._fit_compute_reward(data))
        trainer._fit_collect_metrics(data)
    expected = oracle.gdpo(REWARDS, GROUPS)
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert trainer.metrics["gdpo/correctness/min"] == -3.0
    assert "critic/score/mean" in trainer.metrics


def test_one_step_off_policy_dumps(tmp_path):
    """verl's own has nothing to write with."""
    from verl.experimental.one_step_off_policy.ray_trainer import OneStepOffRayTrainer

    trainer = object.__new__(OneStepOffRayTrainer)
    trainer.config, trainer.global_steps = verl_config(), 7
    trainer.train_dataset = trainer.val_dataset = None
    texts = {"inputs": ["a"], "outputs": ["b"], "gts": ["c"], "scores": [1.0]}
    rows = {**texts, "reward_extra_infos_dict": {"format": [0.5]}, "dump_path": str(tmp_path)}
    with pytest.raises(AttributeError, match="_dump_executor"):
        trainer._dump_generations(**rows)
    stand_in(legacy.create_dataloader, lambda self: None)(trainer)
    trainer._dump_generations(**rows)
    trainer._shutdown_dump_executor()
    assert json.loads((tmp_path / "7.jsonl").read_text())["format"] == 0.5


# --- before Ray starts ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def checkpoints_elsewhere(tmp_path, monkeypatch):
    """A start is recorded in verl's default folder of checkpoints, which is relative."""
    monkeypatch.chdir(tmp_path)


def run(config):
    return run_with_plugins(lambda config, task_runner_class=None: "started", config)


def test_run_ppo_is_checked():
    assert inspect.unwrap(main_ppo.run_ppo) is not main_ppo.run_ppo
    assert run(verl_config()) == "started"
    with pytest.raises(ValueError, match="use_kl_in_reward"):
        run(verl_config("algorithm.use_kl_in_reward=True"))


def test_the_nodes_are_compared_and_get_the_file_of_metrics(monkeypatch):
    """On a cluster that was there before, a process does not inherit from the driver."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "runs/x/metrics/3.jsonl")
    done, given = [], []
    monkeypatch.setattr(before_training, "refuse_other_states", lambda: done.append("compared"))
    runner = SimpleNamespace(remote=lambda: done.append("made"))

    def run_ppo(config, task_runner_class):
        given.append(OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {})
        task_runner_class.remote()

    run_with_plugins(run_ppo, verl_config("trainer.logger=[file]"), task_runner_class=runner)
    assert done == ["compared", "made"]
    assert given == [{"VERL_FILE_LOGGER_PATH": "runs/x/metrics/3.jsonl"}]
    others = ("algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive")
    run_with_plugins(run_ppo, verl_config(*others), task_runner_class=runner)
    assert (done[2:], given[1:]) == (["made"], [{}])


def test_a_partial_mapping_is_refused_before_ray_starts(tmp_path):
    table = pa.table({"data_source": ["rlla", "rlla"]})
    pq.write_table(table, tmp_path / "train.parquet")
    given = [f"data.train_files={tmp_path}/train.parquet", "++algorithm.gdpo.rewards.format=0.5"]
    with pytest.raises(ValueError, match=r"rewards=\{format: 0.5, correctness: 1.0\}'"):
        run(verl_config(*given))
    assert run(verl_config(*given, "++algorithm.gdpo.rewards.correctness=null")) == "started"
