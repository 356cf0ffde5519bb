"""`./run_tool_rl.sh` from a fresh copy of the repository, with a tiny step count; and stopped."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from data_prep.synthetic import make_rows
from verl_gdpo.cpu.tiny_model import make_tiny_model
from verl_gdpo.run_folder import read_metrics

pytestmark = pytest.mark.e2e

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = ["run_tool_rl.sh", "setup_env.sh", "tests/run.sh", ".ci/run"]
COPIED = ["recipes", "verl_gdpo", "data_prep", "requirements", "pyproject.toml"]
MARK = "VERL_GDPO_SCRIPT_TEST"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a user has after `git clone`, and the environment that this test runs in."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in [*COPIED, *SCRIPTS[:2]]:
        copy = shutil.copytree if (REPO / name).is_dir() else shutil.copy
        copy(REPO / name, folder / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    rows = make_rows(64, split="train", seed=0, size="tiny")
    texts = [message["content"] for row in rows for message in row["prompt"]]
    make_tiny_model(folder / "model", texts=texts, vocab_size=768, seed=1)
    return folder


def start(checkout, *arguments, mark):
    command = [
        *("./run_tool_rl.sh", "hardware=cpu"),
        f"actor_rollout_ref.model.path={checkout}/model",
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
        "data.val_max_samples=8",
        *("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.save_freq=2"),
        *arguments,
    ]
    return subprocess.Popen(
        command,
        cwd=checkout,
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a background job ignores SIGINT and hands that on; bash cannot trap what it ignores
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def alive(mark):
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    done = subprocess.run(["bash", "-n", REPO / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shellcheck = Path(sys.prefix) / "bin" / "shellcheck"
    done = subprocess.run([shellcheck, REPO / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_from_nothing_to_the_table(checkout):
    process = start(checkout, mark="whole")
    output, _ = process.communicate(timeout=480)
    assert process.returncode == 0, output
    assert not alive("whole")
    table = output.split("reward curves")[0]
    for name in ("format", "correctness"):
        assert re.search(rf"^{name} +(-?\d\.\d+ +){{3}}-?\d\.\d+$", table, re.M), output
    for label in ("reward curves", "metrics", "rollouts", "checkpoint", "log"):
        path = re.search(rf"^{label} +(\S+)$", output, re.M)[1]
        assert (checkout / path).exists(), path


def test_resumed(checkout):
    (run,) = (checkout / "runs").iterdir()
    process = start(checkout, "trainer.total_training_steps=3", "--resume", mark="resumed")
    output, _ = process.communicate(timeout=480)
    assert process.returncode == 0, output
    assert list((checkout / "runs").iterdir()) == [run]
    assert re.findall(r"step +(\d+)  format", output) == ["3"]
    assert sorted(read_metrics(run)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("number", "when", "exit_code"),
    [
        (signal.SIGINT, "starting Ray", 130),
        (signal.SIGTERM, "step    1", 143),
    ],
    ids=["Ctrl-C while starting", "SIGTERM while training"],
)
def test_stopped(checkout, number, when, exit_code):
    mark = f"stop {number}"
    process = start(checkout, "trainer.total_training_steps=500", mark=mark)
    for line in process.stdout:
        if when in line:
            break
    process.send_signal(number)
    stopped = time.monotonic()
    assert process.wait(15) == exit_code
    assert not alive(mark)
    assert time.monotonic() - stopped < 15
    process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "nowhere"], "nothing to resume in 'nowhere'"),
        (["hardware=9gpu"], "no recipes/hardware/9gpu.yaml"),
        (["steps"], "expected key=value"),
    ],
)
def test_refused_arguments(checkout, arguments, message):
    done = subprocess.run(
        ["./run_tool_rl.sh", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert message in done.stderr
