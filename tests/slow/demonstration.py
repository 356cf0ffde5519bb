"""`./run_demo.sh` trains two arms side by side, shows the result, and leaves nothing behind."""

import os
import re
import signal
import subprocess

from processes import wait_for
from repository import REPO

from verl_gdpo.tools.run_folder.folder import read_metrics


def start(folder):
    return subprocess.Popen(
        [REPO / "run_demo.sh", "trainer.total_training_steps=3", f"run_dir={folder}"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_three_steps_in_a_folder_with_a_space(tmp_path):
    process = start(tmp_path / "a run")
    output, _ = process.communicate(timeout=480)
    assert process.returncode == 0, output
    for arm in ("grpo", "gdpo"):
        steps = read_metrics(tmp_path / "a run" / arm)
        assert [*steps] == [1, 2, 3]
        for reward in ("format", "judge"):
            first = f"{steps[1][f'gdpo/{reward}/mean']:.3g}"
            assert re.search(rf"^{reward} +{first} +\S+ +\S+$", output, re.M)
    assert (tmp_path / "a run" / "report" / "index.html").is_file()
    assert re.search(r"^Which animal lives in the \w+\?\n  start, step 1  ", output, re.M)


def test_sigterm_ends_both_arms(tmp_path):
    process = start(tmp_path / "run")
    logs = [tmp_path / "run" / f"{arm}.log" for arm in ("grpo", "gdpo")]
    wait_for(lambda: all(log.exists() and "checking the" in log.read_text() for log in logs), 240)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)  # its output ends with the last process that has it
    assert process.returncode == 143
    for log in logs:
        assert subprocess.run(["pgrep", "-f", log.with_suffix("")]).returncode == 1
