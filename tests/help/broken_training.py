"""Starts, breaks and resumes a training, for faults, nodes and resume in tests/slow/."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext

import hanging
import pandas as pd
from processes import marked
from ray_session import ray_folder
from rollout_check import SAMPLES
from small_trainings import overrides
from start_verl import ENVIRONMENT, verl_command
from tool_rows import tool_row

from verl_gdpo.tools.run.resume import arguments, quoted
from verl_gdpo.tools.run.stop_conditions import HANG_FILE
from verl_gdpo.tools.run_folder.dump_reader import dump_files, read_dump
from verl_gdpo.tools.run_folder.folder import read_metrics
from workshop.tiny_policy.model import make_tiny_model

MARK = "VERL_GDPO_FAULT_TEST"
STARTED_SECONDS = 480
ENDED_SECONDS = 900  # from the fault to the end of the run, on a machine that does much else
SAVED, LAST = 4, 7  # steps: the checkpoint, and the last one that a resumed run does again


def write_rows(path, place, count=20):
    """Prompts that differ, so that a response belongs to one prompt."""
    rows = [tool_row(index, "train") for index in range(count)]
    for index, row in enumerate(rows):
        row["prompt"] = [{"role": "user", "content": f"Weather in {place} {index}?"}]
    pd.DataFrame(rows).to_parquet(path)


class Training:
    """A run folder, started again and again with the same command until something ends it.

    joins: whether it joins a cluster, instead of a Ray of its own.
    """

    def __init__(self, folder, *more, joins=False, **environment):
        self.environment, self.joins = environment, joins
        self.folder, self.data, model = folder / "run", folder / "train.parquet", folder / "model"
        self.starts = 0
        write_rows(self.data, "Oslo")
        texts = [f"Weather in Oslo {index}?" for index in range(20)]
        make_tiny_model(model, texts=texts, initializer_range=0.1, seed=1)
        self.overrides = overrides(
            folder,
            f"data.val_files={quoted(str(self.data))}",
            *("trainer.total_training_steps=100000", "trainer.total_epochs=100000"),
            *("trainer.val_before_train=False", f"trainer.save_freq={SAVED}"),
            *more,
        )

    @contextmanager
    def started(self, *more):
        """The launcher, running."""
        with self._ray_folder() as ray_dir:
            command = verl_command(self.folder, ray_dir, [*self.overrides, *more])
            with self._launched(command) as launcher:
                yield launcher

    @contextmanager
    def resumed(self, *more):
        """The launcher, going on as `run.sh --resume` does."""
        with self._ray_folder() as ray_dir:
            place = f"++ray_kwargs.ray_init._temp_dir={ray_dir}"
            given = arguments(self.folder, [*more, place])
            main = [sys.executable, "-m", "verl.trainer.main_ppo"]
            with self._launched([*main, *given]) as launcher:
                yield launcher

    def _ray_folder(self):
        return nullcontext("null") if self.joins else ray_folder()

    @contextmanager
    def _launched(self, command):
        self.starts += 1
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "verl_gdpo", "run", "--run-dir", str(self.folder)),
                *("--time-limit", "900", "--"),
                *command,
            ],
            env={**os.environ, **ENVIRONMENT, **self.environment, MARK: str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield launcher
        finally:
            for process in self.processes():
                process.kill()
            launcher.communicate()

    def processes(self):
        return marked(MARK, str(self.folder))

    def process(self, name):
        """An actor by its class, or the driver."""
        command = {process: process.cmdline() for process in self.processes()}
        (found, *_) = [
            process
            for process, words in command.items()
            if words[0].startswith(f"ray::{name}")
            or (name == "driver" and words[1:3] == ["-m", "verl.trainer.main_ppo"])
        ]
        return found

    def wait_for(self, launcher, step=None):
        """Until this start has logged the step, or any step, and its dump is whole."""
        deadline = time.monotonic() + STARTED_SECONDS
        metrics = self.folder / "metrics" / f"{self.starts}.jsonl"
        text = '"step":' if step is None else f'"step":{step},'
        while text not in (metrics.read_text() if metrics.exists() else ""):
            assert launcher.poll() is None, launcher.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        dump = self.folder / "rollouts" / f"{step}.jsonl"
        while step is not None and not (dump.exists() and dump.read_text().endswith("\n")):
            time.sleep(0.05)

    def end_of(self, launcher, seconds=ENDED_SECONDS):
        """(exit code, the lines that it ended with); nothing is left of the run."""
        output, _ = launcher.communicate(timeout=seconds)
        assert not self.processes()
        return launcher.returncode, output

    def rollouts(self, steps):
        """{step: what was generated and learned from, whatever the random ids of its groups}."""
        found = {}
        for step in steps:
            rows = read_dump(self.folder / "rollouts" / f"{step}.jsonl")
            kept = [
                (row["input"], row["output"], sorted(row["rewards"].items()), row["advantage"])
                for row in rows
                if not row["is_padding"]
            ]
            found[step] = sorted(kept)
        return found

    def check_readable(self):
        """Every later command takes the folder as it is."""
        steps = [int(path.stem) for files in dump_files(self.folder) for path in files]
        assert sorted(steps) == [*range(1, len(steps) + 1)]
        assert {*read_metrics(self.folder)} <= {*steps}
        replay = [sys.executable, "-m", "verl_gdpo", "replay", str(self.folder)]
        done = subprocess.run(replay, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def train_until_killed(training, at_step_2=lambda: None):
    """{step: rollouts} after the checkpoint, of a start whose driver gets SIGKILL after step 7."""
    with training.started() as launcher:
        training.wait_for(launcher, 2)
        at_step_2()
        training.wait_for(launcher, LAST)
        training.process("driver").kill()
        exit_code, output = training.end_of(launcher)
        assert exit_code != 0
        assert "the training process was ended by SIGKILL" in output
    training.check_readable()
    return training.rollouts(range(SAVED + 1, LAST + 1))


def check_resumed(training, launcher, expected):
    """A start that goes on from the checkpoint repeats the steps after it exactly."""
    training.wait_for(launcher, LAST)
    log = (training.folder / "train.log").read_text()
    assert f"global_step_{SAVED}, setting global step to {SAVED}" in log
    found = training.rollouts(expected)
    differing = {
        step: [pair for pair in zip(rows, expected[step], strict=True) if pair[0] != pair[1]]
        for step, rows in found.items()
    }
    assert not any(differing.values()), {step: pairs[:2] for step, pairs in differing.items()}
    outputs = [{row[1] for row in rows} for rows in expected.values()]
    assert all(len(found) > SAMPLES for found in outputs)
    assert len(set().union(*outputs)) > max(map(len, outputs))  # the policy changes


def hanging_training(folder, what, *overrides):
    """(a training in which something of `hanging.py` hangs as soon as a file exists, this file)."""
    trigger, imported = folder / what, os.path.dirname(hanging.__file__)
    training = Training(
        folder,
        f"reward.custom_reward_function.path={hanging.__file__}",
        *overrides,
        HANG=str(trigger),
        VERL_USE_EXTERNAL_MODULES="hanging",
        PYTHONPATH=os.pathsep.join([imported, os.environ.get("PYTHONPATH", "")]),
    )
    return training, trigger


def check_hang(training, launcher):
    """The lines with which a run ends that logs no step."""
    start = time.monotonic()
    exit_code, output = training.end_of(launcher)
    print(f"{time.monotonic() - start:.0f} s\n{output}")
    assert exit_code == 1
    assert "HangError: no step was logged for " in output
    assert (training.folder / HANG_FILE).exists()
    return output
