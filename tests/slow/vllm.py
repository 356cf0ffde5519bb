"""Real vLLM as verl's rollout engine, without a GPU.

The environment is the one that `./run.sh` makes. Its processes, files in /dev/shm and folders in
/tmp are gone after each run.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import oracle
import pytest
from repository import REPO

from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tools.run_folder.folder import read_metrics

HELP = REPO / "tests" / "help"
SHARED = ("/dev/shm/*", "/tmp/rl-colocate-*")
STEPS = 20
# float32 on both sides; probabilities differ by 1e-2 where one update of the weights is missing
SYNCED = 1e-4


def left_behind():
    return {str(path) for pattern in SHARED for path in Path("/").glob(pattern[1:])}


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """Also not in a folder for temporary files that is the test's own."""
    before = left_behind()
    with tempfile.TemporaryDirectory(prefix="vg", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield
        files = [path for path in Path(folder).rglob("*") if not path.is_dir()]
        # the compiler's cache is for the next run
        assert not [path for path in files if "torchinductor_" not in str(path)]
    assert left_behind() <= before


@pytest.fixture(scope="session", autouse=True)
def environment():
    subprocess.run([REPO / "setup_env.sh", "cpu", "vllm"], timeout=900, check=True)


def trained(run, engine, *overrides, **env):
    """Metrics by step of a run of the tool-calling policy."""
    command = [
        *(REPO / "run.sh", "tool_rl", "hardware=cpu", "--time-limit", "700"),
        *(f"rollout_engine={engine}", f"run_dir={run}", "trainer.val_before_train=False"),
        *("trainer.test_freq=-1", "trainer.save_freq=-1", *overrides),
        "algorithm.rollout_correction.bypass_mode=false",  # logs how much probabilities differ
    ]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_metrics(run)


def test_training(tmp_path):
    """20 steps: the weights arrive, advantages are the oracle's, rewards are like those with hf."""
    last, steps = {}, f"trainer.total_training_steps={STEPS}"
    for engine in ("vllm_cpu", "hf"):
        metrics = trained(tmp_path / engine, engine, steps)
        assert sorted(metrics) == [*range(1, STEPS + 1)]
        diffs = [of_step["training/rollout_probs_diff_max"] for of_step in metrics.values()]
        assert max(diffs) < SYNCED
        for name in ("format", "correctness"):
            means = [metrics[step][f"gdpo/{name}/mean"] for step in range(STEPS - 9, STEPS + 1)]
            last[engine, name] = np.mean(means)
        print(engine, "largest difference of probabilities", max(diffs))
    print(last)
    for name, tolerance in (("format", 0.1), ("correctness", 0.4)):
        assert abs(last["vllm_cpu", name] - last["hf", name]) < tolerance
    worst = 0.0
    for file in (tmp_path / "vllm_cpu" / "rollouts").glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        rewards = [list(tool_rl.score(row["output"], row["gts"]).values()) for row in rows]
        expected = oracle.gdpo(rewards, [row["group"] for row in rows])
        worst = max(worst, *(abs(e - r["advantage"]) for e, r in zip(expected, rows, strict=True)))
    print("largest difference from the oracle", worst)
    assert worst < 1e-5


def test_a_missing_sync_shows(tmp_path):
    """Step 1 was never synced, step 2 was, and step 3 has the weights of step 2."""
    metrics = trained(
        tmp_path / "run",
        "vllm_cpu",
        "trainer.total_training_steps=3",
        VERL_USE_EXTERNAL_MODULES="dropped_syncs",
        PYTHONPATH=str(HELP),
    )
    never, synced, stale = (metrics[s]["training/rollout_probs_diff_max"] for s in (1, 2, 3))
    print("never", never, "synced", synced, "stale", stale)
    assert synced < SYNCED < 10 * SYNCED < min(never, stale)
