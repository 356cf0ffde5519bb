"""`./run_tool_rl.sh` in a fresh copy of the repository: a run is trained, resumed and stopped.

A tiny untrained model gets ToolRL's rewards, which are always the lowest for it, and two rewards
that vary.
"""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import varied_reward
from processes import marked
from repository import REPO, tracked_files
from rollout_check import SIZES, check_rollouts

from verl_gdpo.tasks.tool_rl.rows import make_rows
from verl_gdpo.tools.run.resume import quoted
from verl_gdpo.tools.run_folder.dump_reader import read_dump
from verl_gdpo.tools.run_folder.folder import read_metrics
from workshop.tiny_policy.model import make_tiny_model

SCRIPTS = ["run.sh", "run_demo.sh", "run_tool_rl.sh", "setup_env.sh", "tests/run.sh", ".ci/run"]
MARK = "VERL_GDPO_SCRIPT_TEST"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What a user has after `git clone`, and the environment that this test runs in."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in tracked_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPO / path, folder / path, follow_symlinks=False)
    link_environment(folder)
    rows = [*make_rows(64, split="train", seed=0)]
    texts = [message["content"] for row in rows for message in row["prompt"]]
    make_tiny_model(folder / "model", texts=texts, vocab_size=768, initializer_range=0.1, seed=1)
    return folder


def link_environment(folder):
    """Let the checkout have the environment of this test, which takes minutes to install."""
    venv = folder / ".venv-cpu-linked"
    venv.mkdir()
    for path in Path(sys.prefix).iterdir():
        (venv / path.name).symlink_to(path)
    pins = [f"requirements/{name}.txt" for name in ("cpu", "dev")]
    files = [REPO / name for name in ("pyproject.toml", *pins)]
    version, whole = sys.version.split()[0], b"".join(path.read_bytes() for path in files)
    stamp = venv / "verl_gdpo_env"
    stamp.unlink(missing_ok=True)
    stamp.write_text(f"cpu {folder} {version} {hashlib.sha256(whole).hexdigest()}\n")
    (folder / ".venv").symlink_to(venv.name)


GDPO_REWARDS = {
    "correctness": 1.0,
    "format": 1.0,
    "letters": 1.0,
    "brevity": "{weight:{1:0.5,3:1.5},when:{reward:letters,at_least:0.4}}",
}


def weights_at(step):
    """`brevity` weighs .5, 1 and 1.5 in steps 1, 2 and 3, and stays there."""
    return {**GDPO_REWARDS, "brevity": min(0.5 * step, 1.5)}


def conditioned(rewards):
    """`brevity` counts where enough of the response is letters."""
    return rewards if rewards["letters"] >= 0.4 else {**rewards, "brevity": 0.0}


def start(checkout, *arguments, mark):
    command = [
        *("./run_tool_rl.sh", "hardware=cpu", "algorithm.rollout_correction.bypass_mode=false"),
        f"actor_rollout_ref.model.path={quoted(f'{checkout}/model')}",
        *SIZES,
        *("actor_rollout_ref.actor.optim.lr=1e-3", "data.val_max_samples=8"),
        *(f"+algorithm.gdpo.rewards.{name}={w}" for name, w in GDPO_REWARDS.items()),
        f"reward.custom_reward_function.path={quoted(varied_reward.__file__)}",
        *("trainer.total_training_steps=3", "trainer.test_freq=3", "trainer.save_freq=3"),
        *arguments,
    ]
    return subprocess.Popen(
        command,
        cwd=checkout,
        # the environment's own package is that of the repository
        env={**os.environ, MARK: mark, "PYTHONPATH": str(checkout)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a background job ignores SIGINT and hands that on; bash cannot trap what it ignores
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck(script):
    shellcheck = Path(sys.prefix) / "bin" / "shellcheck"
    done = subprocess.run([shellcheck, REPO / script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def trained(checkout):
    """(the run's folder, what the script said) of three steps with a checkpoint."""
    process = start(checkout, mark="whole")
    output, _ = process.communicate(timeout=480)
    assert process.returncode == 0, output
    assert not marked(MARK, "whole")
    (run,) = (checkout / "runs").iterdir()
    return run, output


def dump(run, step):
    return read_dump(run / "rollouts" / f"{step}.jsonl")


def test_from_nothing_to_the_table(checkout, trained):
    _, output = trained
    table = output.split("verl-gdpo report")[0]
    for name in GDPO_REWARDS:
        assert re.search(rf"^{name} +(-?\d\.\d+ +){{3}}-?\d\.\d+$", table, re.M), output
    for label in ("metrics", "rollouts", "checkpoint", "log"):
        path = re.search(rf"^{label} +(\S+)$", output, re.M)[1]
        assert (checkout / path).exists(), path


def test_gdpo_trains(trained):
    run, _ = trained
    assert (run / "train.log").read_text().count("replaces the gdpo of verl 0.9.1") == 1
    steps = read_metrics(run)
    assert sorted(steps) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        metrics = steps[step]
        rows = dump(run, step)
        check_rollouts(rows, weights_at(step), conditioned)
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] > 0
        for name in GDPO_REWARDS:
            values = [conditioned(row["rewards"])[name] for row in rows if not row["is_padding"]]
            logged = [metrics[f"gdpo/{name}/{s}"] for s in ("mean", "min", "max")]
            expected = [sum(values) / len(values), min(values), max(values)]
            assert logged == pytest.approx(expected, abs=1e-6)
        assert metrics["gdpo/batch_norm_mean"] == pytest.approx(0, abs=1e-9)
    for step in (0, 3):
        for name in GDPO_REWARDS:
            assert f"val-aux/rlla/{name}/mean@1" in steps[step]


@pytest.mark.slow
def test_resumed_and_stopped(checkout, trained):
    """SIGTERM while training, of a start that goes on with the latest run."""
    run, _ = trained
    more = ("trainer.total_training_steps=500", "--allow-change", "trainer.total_training_steps")
    process = start(checkout, *more, "--resume", mark="resumed")
    output = stop_at("step    5", process, signal.SIGTERM, exit_code=143, mark="resumed")
    assert list((checkout / "runs").iterdir()) == [run]
    assert re.findall(r"step +(\d+)  ", output) == ["3", "4", "5"]  # of the first, its validation
    assert "global_step_3, setting global step to 3" in (run / "train.log").read_text()
    assert sorted(read_metrics(run))[:6] == [0, 1, 2, 3, 4, 5]
    check_rollouts(dump(run, 4), weights_at(4), conditioned)


@pytest.mark.slow
def test_stopped_while_starting(checkout):
    """Ctrl-C while Ray is being started."""
    process = start(checkout, mark="stopped")
    stop_at("check: no problem found", process, signal.SIGINT, exit_code=130, mark="stopped")


def stop_at(text, process, number, exit_code, mark):
    """Send the signal after this line, and return the lines until then; nothing is left."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            break
    process.send_signal(number)
    stopped = time.monotonic()
    assert process.wait(15) == exit_code, "".join(lines)
    assert not marked(MARK, mark)
    assert time.monotonic() - stopped < 15
    process.stdout.close()
    return "".join(lines)
