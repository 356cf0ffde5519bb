"""Runs of verl that hang: each ends, and says where. A part of `nox -s faults`."""

import os
import signal
import time

import hanging
import pytest
from broken_training import Training

from verl_gdpo.run.folder import read_metrics
from verl_gdpo.run.stacks import HANG_FILE

FLOOR_MINUTES = 2  # the start: 6; the first of each phase: 24
ENDED_SECONDS = 900
RANKS = ("ray_kwargs.ray_init.num_gpus=2", "trainer.n_gpus_per_node=2")


def hanging_training(folder, what, *overrides):
    """(a training in which something hangs as soon as a file exists, this file)."""
    trigger = folder / what
    training = Training(
        folder,
        f"reward.custom_reward_function.path={hanging.__file__}",
        *overrides,
        HANG=str(trigger),
        VERL_USE_EXTERNAL_MODULES="hanging",
        PYTHONPATH=os.pathsep.join(
            [os.path.dirname(hanging.__file__), os.environ.get("PYTHONPATH", "")]
        ),
    )
    return training, trigger


def check(training, launcher, phase):
    """The lines of a run that ends with an error, which names the phase."""
    start = time.monotonic()
    exit_code, output = training.end_of(launcher, ENDED_SECONDS)
    print(f"{phase}: {time.monotonic() - start:.0f} s\n{output}")
    assert exit_code == 1
    assert "HangError: no progress for " in output
    assert f"in the phase '{phase}' of step " in output
    return output


@pytest.mark.parametrize(
    ("what", "phase", "overrides"),
    [
        ("scorer", "gen", ()),
        ("collective", "old_log_prob", RANKS),
        ("save", "save_checkpoint", ("trainer.save_freq=1",)),
    ],
)
def test_what_hangs_in_a_process(tmp_path, what, phase, overrides):
    training, trigger = hanging_training(
        tmp_path, what, f"trainer.hang_minutes={FLOOR_MINUTES}", *overrides
    )
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        trigger.touch()
        output = check(training, launcher, phase)
    assert {
        "scorer": "All its processes answer; reward worker 0 scores prompt uid ",
        "collective": "Busy or silent: actor_rollout rank 0 (process ",
        "save": "Busy or silent: actor_rollout rank 0 (process ",
    }[what] in output
    stacks = (training.folder / HANG_FILE).read_text()
    assert {"collective": "all_reduce"}.get(what, "in deadlock") in stacks


@pytest.mark.parametrize(
    ("process", "said"),
    [
        ("RewardLoopWorker", "Busy or silent: reward worker 0 (process "),
        ("TaskRunner", "has given no sign of life for "),
    ],
)
def test_a_process_that_is_stopped(tmp_path, process, said):
    training = Training(tmp_path, f"trainer.hang_minutes={FLOOR_MINUTES}")
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        training.process(process).send_signal(signal.SIGSTOP)
        start = time.monotonic()
        exit_code, output = training.end_of(launcher, ENDED_SECONDS)
        print(f"{process}: {time.monotonic() - start:.0f} s\n{output}")
    assert exit_code == 1
    if "RolloutError" in output:  # Ray may give up the connection first, after two minutes
        assert process == "RewardLoopWorker" and "reward worker 0 does not answer" in output
        return
    assert said in output
    assert f", stopped: ray::{process}" in (training.folder / HANG_FILE).read_text()


def test_what_is_slow_goes_on(tmp_path):
    """A judge that becomes ten times slower; training and validation then exceed their limits."""
    training, trigger = hanging_training(
        tmp_path,
        "judge",
        *("trainer.hang_minutes=1.5", "reward.custom_reward_function.name=judged"),
        *("reward.num_workers=1", "trainer.test_freq=1", "trainer.total_training_steps=3"),
    )
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        trigger.touch()
        exit_code, output = training.end_of(launcher, ENDED_SECONDS)
    assert exit_code == 0, output
    timing = read_metrics(training.folder)[3]
    assert min(timing["timing_s/gen"], timing["timing_s/testing"]) > 90
