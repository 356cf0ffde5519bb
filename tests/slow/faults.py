"""More runs of verl that fail: `nox -s faults` takes about ten minutes."""

import os
import resource

import psutil
import pytest
from broken_training import SAVED, Training, check_resumed, train_until_killed
from small_trainings import assets, check_error, overrides  # noqa: F401
from start_verl import run_verl

from verl_gdpo.verl_hooks.checkpoints import TRACKER

pytestmark = pytest.mark.e2e


def fill_disk(training):
    """No file of any Python process of the run takes another byte, as on a full disk.

    The error is EFBIG instead of ENOSPC. Ray's own servers are left alone: they would be killed.
    """
    for process in training.processes():
        if process.name() not in ("gcs_server", "raylet"):
            process.rlimit(psutil.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def test_one_fault_after_the_other(tmp_path):
    """Each start except the first one continues the run that the previous fault has stopped."""
    training = Training(tmp_path)
    expected = train_until_killed(training)
    with training.started() as launcher:
        check_resumed(training, launcher, expected)
        training.process("HFServer").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "RolloutError: rollout server 0, node 0 (llm) died." in output
    for name, said in {
        "AgentLoopWorkerTQ": "agent loop worker 0 died.",
        "SimpleStorageUnit": "TransferQueueStorageUnit#0 died.",
    }.items():
        with training.started() as launcher:
            training.wait_for(launcher)
            training.process(name).kill()
            exit_code, output = training.end_of(launcher)
        assert exit_code == 1
        assert f"RolloutError: {said}" in output
    with training.started() as launcher:
        training.wait_for(launcher)
        fill_disk(training)
        exit_code, output = training.end_of(launcher)
    assert exit_code != 0
    assert f"{training.folder} cannot be written: [Errno 27] File too large" in output
    tracker = training.folder / "checkpoints" / TRACKER
    os.truncate(tracker, 0)  # what verl leaves if the disk fills up just then
    with training.started() as launcher:
        training.wait_for(launcher)
    assert tracker.read_text() == str(SAVED)
    training.check_readable()


def test_an_asynchronous_trainer_without_its_server(tmp_path):
    """It would send out prompt after prompt."""
    training = Training(tmp_path, "trainer.v1.trainer_mode=colocate_async")
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        training.process("HFServer").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "RolloutError: rollout server 0, node 0 (llm) died." in output
    training.check_readable()


def test_without_the_plugin_verls_own_gdpo_fails(assets, tmp_path):  # noqa: F811
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            "+algorithm.gdpo_reward_keys=[letters,brevity]",
            "trainer.val_before_train=False",
            scorer="with_score",
        ),
        VERL_USE_EXTERNAL_PLUGINS="verl_gdpo_cpu",
    )
    assert run.exit_code != 0
    assert 'key "prompts" not found in TensorDict' in run.output, run.last_lines()


def test_an_unknown_reward_name_stops_the_run(assets, tmp_path):  # noqa: F811
    run = run_verl(
        tmp_path, overrides(assets, "+algorithm.gdpo.rewards.corectness=1.0", scorer=None)
    )
    check_error(run, r"reward 'corectness' is configured, but .* did you mean 'correctness'")
    assert not run.steps()
