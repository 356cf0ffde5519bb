"""verl's trainers with their own main module: each runs as far as a CPU allows, or is refused.

These tests run on the installed verl, and with `nox -s verl` on another one.
"""

import inspect
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import oracle
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl.trainer import main_ppo
from verl.trainer.ppo import ray_trainer
from verl_batch import GDPO, GROUPS, REWARDS, batch, verl_config

from verl_gdpo.verl_hooks import nodes
from verl_gdpo.verl_hooks.driver import checked
from verl_gdpo.verl_hooks.trainer_mixin import NOT_FULLY_ASYNC


def test_one_step_off_policy_from_rewards_to_metrics():
    """Through its own methods. Not run: generation in the background, and weights sent to it."""
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
    data = trainer._fit_compute_advantage(trainer._fit_compute_reward(data))
    trainer._fit_collect_metrics(data)
    expected = oracle.gdpo(REWARDS, GROUPS)
    assert data.batch["advantages"][:, 0].tolist() == pytest.approx(expected, abs=1e-6)
    assert trainer.metrics["gdpo/correctness/min"] == -3.0
    assert "critic/score/mean" in trainer.metrics


# --- before Ray starts ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def checkpoints_elsewhere(tmp_path, monkeypatch):
    """A start is recorded in verl's default folder of checkpoints, which is relative."""
    monkeypatch.chdir(tmp_path)


def run(config):
    return checked(lambda config, task_runner_class=None: "started")(config)


def fully_async(**algorithm):
    config = verl_config()
    OmegaConf.set_struct(config, False)
    return OmegaConf.merge(config, {"async_training": {}, "algorithm": algorithm})


def test_run_ppo_is_checked():
    assert inspect.unwrap(main_ppo.run_ppo) is not main_ppo.run_ppo
    assert run(verl_config()) == "started"
    with pytest.raises(ValueError, match="use_kl_in_reward"):
        run(verl_config("algorithm.use_kl_in_reward=True"))


def test_the_nodes_are_compared_and_get_the_file_of_metrics(monkeypatch):
    """On a cluster that was there before, a process does not inherit from the driver."""
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "runs/x/metrics/3.jsonl")
    done, given = [], []
    monkeypatch.setattr(nodes, "refuse_other_states", lambda: done.append("compared"))
    runner = SimpleNamespace(remote=lambda: done.append("made"))

    def run_ppo(config, task_runner_class):
        given.append(OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {})
        task_runner_class.remote()

    checked(run_ppo)(verl_config("trainer.logger=[file]"), task_runner_class=runner)
    assert done == ["compared", "made"]
    assert given == [{"VERL_FILE_LOGGER_PATH": "runs/x/metrics/3.jsonl"}]
    others = ("algorithm.adv_estimator=grpo", "reward.reward_manager.name=naive")
    checked(run_ppo)(verl_config(*others), task_runner_class=runner)
    assert (done[2:], given[1:]) == (["made"], [{}])


def test_a_partial_mapping_is_refused_before_ray_starts(tmp_path):
    table = pa.table({"data_source": ["rlla", "rlla"]})
    pq.write_table(table, tmp_path / "train.parquet")
    given = [f"data.train_files={tmp_path}/train.parquet", "++algorithm.gdpo.rewards.format=0.5"]
    with pytest.raises(ValueError, match=r"rewards=\{format: 0.5, correctness: 1.0\}'"):
        run(verl_config(*given))
    assert run(verl_config(*given, "++algorithm.gdpo.rewards.correctness=null")) == "started"


def test_fully_async_policy_is_refused_with_gdpo_alone():
    for algorithm in ({}, {"adv_estimator": "grpo"}):  # the reward manager is gdpo in both
        with pytest.raises(ValueError, match="does not run on fully_async_policy: when a sample"):
            run(fully_async(**algorithm))
    config = fully_async(adv_estimator="grpo")
    config.reward.reward_manager.name = "naive"
    assert run(config) == "started"


def test_fully_async_policy_is_refused_with_a_subclass_of_our_manager(tmp_path):
    text = "from verl_gdpo.verl_hooks.reward_manager import GdpoRewardManager as Mine"
    (tmp_path / "mine.py").write_text(text)
    config = fully_async(adv_estimator="grpo")
    config.reward.reward_manager.name = "Mine"
    config.reward.reward_manager.source = "importlib"
    config.reward.reward_manager.module.path = f"{tmp_path}/mine.py"
    trainer = object.__new__(ray_trainer.RayPPOTrainer)
    trainer.config = config
    with pytest.raises(ValueError, match="does not run on fully_async_policy"):
        trainer._create_dataloader(None, None, None, None)


def start(module, *overrides):
    return subprocess.run(
        [sys.executable, "-m", module, *overrides, *GDPO],
        env={**os.environ, "HYDRA_FULL_ERROR": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow  # verl is started
def test_fully_async_policy_stops_before_ray_starts(tmp_path):
    module = "verl.experimental.fully_async_policy.fully_async_main"
    done = start(module, f"hydra.run.dir={tmp_path}")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(NOT_FULLY_ASYNC)
    assert "Started a local Ray instance" not in done.stderr
