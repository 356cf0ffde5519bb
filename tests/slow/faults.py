"""Faults during a training with verl: the run continues or ends with a reason, and can be resumed.

A start of verl takes more than a minute, so each start tests as many faults as possible. `nodes.py`
kills a reward worker.
"""

import os
import re
import resource
import shutil

import psutil
from broken_training import (
    SAVED,
    STARTED_SECONDS,
    Training,
    check_hang,
    check_resumed,
    hanging_training,
    train_until_killed,
    write_rows,
)
from processes import wait_for
from small_trainings import overrides
from start_verl import run_verl

from verl_gdpo.tools.run.checkpoints import TRACKER, newest_checkpoint
from verl_gdpo.tools.run.starts import starts_of
from verl_gdpo.tools.run.stop_conditions import HANG_FILE
from verl_gdpo.tools.run_folder.folder import read_metrics

HANG_MINUTES = "trainer.hang_minutes=2"  # once a start has saved a checkpoint, at step 8


def fill_disk(training):
    """No file of any Python process of the run takes another byte, as on a full disk.

    The error is EFBIG instead of ENOSPC. Ray's own servers are left alone: they would be killed.
    """
    for process in training.processes():
        if process.name() not in ("gcs_server", "raylet"):
            process.rlimit(psutil.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def check_a_killed_worker(training):
    """What the kernel kills first when memory ends: it is named, with what to do."""
    with training.started() as launcher:
        training.wait_for(launcher)
        training.process("WorkerDict").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    (line,) = [line for line in output.splitlines() if "RolloutError: training worker " in line]
    assert re.search(r"training worker \d died\. A start with trainer\.resume_mode=auto", line)
    assert "The memory may have run out (see dmesg)" in line
    assert "logged no signal, as after SIGKILL" in output
    assert "training worker" in starts_of(training.folder)[-1].end["why"]


def test_one_fault_after_the_other(tmp_path):
    """Each start except the first one continues the run that the previous fault has stopped."""
    training, scorer = hanging_training(tmp_path, "scorer", HANG_MINUTES)
    expected = train_until_killed(training)
    with training.started() as launcher:
        check_resumed(training, launcher, expected)
        training.process("AgentLoopWorkerTQ").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "RolloutError: agent loop worker 0 died." in output
    with training.started() as launcher:
        training.wait_for(launcher)
        training.process("SimpleStorageUnit").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "RolloutError: TransferQueueStorageUnit#0 died." in output
    check_a_killed_worker(training)
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
        training.wait_for(launcher, 2 * SAVED)
        scorer.touch()
        check_hang(training, launcher)
    assert "in deadlock" in (training.folder / HANG_FILE).read_text()
    training.check_readable()


def test_filtering_on_two_ranks(tmp_path):
    """A parquet replaced in mid-run, SIGKILL of the driver, a resumed run, a collective less."""
    training, collective = hanging_training(
        tmp_path,
        "collective",
        HANG_MINUTES,
        *("ray_kwargs.ray_init.num_gpus=2", "trainer.n_gpus_per_node=2"),
        # else verl chooses a rollout server at random, and filters by what is done by then
        "actor_rollout_ref.rollout.full_determinism=True",
        *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=score"),
        "reward.custom_reward_function.name=without_signal_for_some",
    )
    original, times = training.data.read_bytes(), training.data.stat()

    def replace_parquet():
        write_rows(tmp_path / "new.parquet", "Lima", count=3)
        os.replace(tmp_path / "new.parquet", training.data)

    expected = train_until_killed(training, replace_parquet)
    assert all("Oslo" in row[0] for rows in expected.values() for row in rows)
    training.data.write_bytes(original)
    os.utime(training.data, ns=(times.st_atime_ns, times.st_mtime_ns))  # a resume compares it
    check_a_killed_worker(training)
    with training.started() as launcher:
        check_resumed(training, launcher, expected)
        training.wait_for(launcher, 2 * SAVED)
        collective.touch()
        output = check_hang(training, launcher)
    assert "ray::WorkerDict" in output
    assert "all_reduce" in (training.folder / HANG_FILE).read_text()
    training.check_readable()
    metrics = read_metrics(training.folder)
    assert all(metrics[step]["training/filter_groups/evicted_samples"] > 0 for step in expected)


def test_an_asynchronous_trainer_without_its_server(tmp_path):
    """It would send out prompt after prompt. Its folder was renamed some steps before."""
    training = Training(tmp_path, "trainer.v1.trainer_mode=colocate_async")
    moved = tmp_path / "moved"
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        training.folder.rename(moved)
        wait_for(lambda: max(read_metrics(moved)) > SAVED, seconds=STARTED_SECONDS)
        training.process("HFServer").kill()
        exit_code, output = training.end_of(launcher)
    assert exit_code == 1
    assert "RolloutError: rollout server 0, node 0 (llm) died." in output
    assert f"step {SAVED:4d}  " in output
    assert output.count(f"the run folder {training.folder} is gone: it is now {moved}.") == 2
    assert "RolloutError" in starts_of(moved)[-1].end["why"]
    # verl made the folder again for rollouts and checkpoints; together they are one run
    assert sorted(os.listdir(training.folder)) == ["checkpoints", "rollouts"]
    shutil.copytree(training.folder, moved, dirs_exist_ok=True)
    shutil.rmtree(training.folder)
    moved.rename(training.folder)
    training.check_readable()
    assert newest_checkpoint(training.folder / "checkpoints").is_dir()


def test_without_the_plugin_verls_own_gdpo_fails(assets, tmp_path):
    run = run_verl(
        tmp_path,
        overrides(
            assets,
            "+algorithm.gdpo_reward_keys=[letters,brevity]",
            "trainer.val_before_train=False",
            # the plugin chooses in the place of `auto`
            "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
            scorer="with_score",
        ),
        VERL_USE_EXTERNAL_PLUGINS="verl_gdpo_cpu,verl_gdpo_run",
    )
    assert run.exit_code != 0
    assert 'key "prompts" not found in TensorDict' in run.output, run.last_lines()
