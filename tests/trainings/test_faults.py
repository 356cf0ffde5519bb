"""Faults during a training with verl: the run continues or ends with a reason, and can be resumed.

A start of verl takes more than a minute, so each start tests as many faults as possible.
`nox -s faults` runs the other faults, in `faults.py`.
"""

import os

import pytest
from broken_training import Training, check_resumed, train_until_killed, write_rows

from verl_gdpo.run.folder import read_metrics

pytestmark = pytest.mark.e2e


def test_filtering_on_two_ranks(tmp_path):
    """A parquet replaced in mid-run, SIGKILL of the driver, a resumed run, a dead reward worker."""
    training = Training(
        tmp_path,
        *("ray_kwargs.ray_init.num_gpus=2", "trainer.n_gpus_per_node=2"),
        # else verl chooses a rollout server at random, and filters by what is done by then
        "actor_rollout_ref.rollout.full_determinism=True",
        *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"),
        "reward.custom_reward_function.name=without_signal_for_some",
    )
    original = training.data.read_bytes()

    def replace_parquet():
        write_rows(tmp_path / "new.parquet", "Lima", count=3)
        os.replace(tmp_path / "new.parquet", training.data)

    expected = train_until_killed(training, replace_parquet)
    assert all("Oslo" in row[0] for rows in expected.values() for row in rows)
    training.data.write_bytes(original)
    with training.started() as launcher:
        check_resumed(training, launcher, expected)
        training.process("RewardLoopWorker").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "RolloutError: reward worker 0 died. A start with trainer.resume_mode=auto" in output
    training.check_readable()
    metrics = read_metrics(training.folder)
    assert all(metrics[step]["training/filter_groups/evicted_samples"] > 0 for step in expected)
