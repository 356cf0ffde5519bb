"""The launcher: exit codes, progress, and that no process is left, whatever ends a run."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from verl_gdpo.faults import faults_from_outside
from verl_gdpo.launch import MARK, failure_report, launch
from verl_gdpo.run_folder import read_metrics, training_rewards, validation_rewards
from verl_gdpo.summary import HEADER, reward_table
from verl_gdpo.tables import render

# a driver that starts a child in a session of its own, as Ray does, and then does `{body}`
DRIVER = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
open("{folder}/child", "w").write(str(child.pid))
{body}
"""


def driver(folder, body):
    return [sys.executable, "-c", DRIVER.format(folder=folder, body=body)]


def child_of(folder):
    return int((folder / "child").read_text())


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("exit_code", [0, 3])
def test_exit_code_and_log_of_the_command(tmp_path, exit_code):
    body = f"print('hello', flush=True); sys.exit({exit_code})"
    assert launch(driver(tmp_path, body), tmp_path, quiet=True) == exit_code
    assert (tmp_path / "train.log").read_text() == "hello\n"
    assert not is_alive(child_of(tmp_path))


def test_time_limit(tmp_path, capsys):
    assert launch(driver(tmp_path, "time.sleep(600)"), tmp_path, time_limit=2) == 124
    assert "time limit reached" in capsys.readouterr().out
    assert not is_alive(child_of(tmp_path))


@pytest.mark.parametrize(
    ("number", "body"),
    [
        (signal.SIGINT, "time.sleep(600)"),
        (signal.SIGTERM, "time.sleep(600)"),
        # a driver that will not listen
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"),
    ],
)
def test_signals_end_every_process(tmp_path, number, body):
    command = [
        *(sys.executable, "-m", "verl_gdpo.launch", "--run-dir", str(tmp_path), "--"),
        *driver(tmp_path, body),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(15) == 128 + number
    assert not is_alive(child_of(tmp_path))


def test_other_processes_are_left_alone(tmp_path):
    bystander = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, MARK: "somebody else"},
    )
    try:
        launch(driver(tmp_path, "sys.exit(0)"), tmp_path, quiet=True)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def step_line(step, **data):
    return json.dumps({"step": step, "data": data}) + "\n"


def test_progress_lines(tmp_path, capsys):
    line = step_line(1, **{"gdpo/format/mean": 0.5, "gdpo/format/std": 0.1, "actor/lr": 1e-6})
    body = (
        f"open(os.environ['VERL_FILE_LOGGER_PATH'], 'w').write({line!r}); time.sleep(1); "
        "sys.exit(0)"
    )
    launch(driver(tmp_path, body), tmp_path)
    assert "step    1  format 0.500" in capsys.readouterr().out


def test_why_a_run_failed(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "(worker) ValueError: inner\nTraceback:\n  x\nray.exceptions.RayTaskError(ValueError): a\n"
        "verl_gdpo.reward_rows.RewardError: reward 'a' is nan\n\nSet HYDRA_FULL_ERROR=1\n"
    )
    report = failure_report(tmp_path).splitlines()
    assert report[0] == "verl_gdpo.reward_rows.RewardError: reward 'a' is nan"
    assert str(log) in report[1]


METRICS = {
    0: {"val-aux/rlla/format/mean@1": 0.2, "val-aux/rlla/reward/mean@1": -1.0},
    1: {"gdpo/format/mean": 0.25, "gdpo/format/max": 1.0, "gdpo/correctness/mean": -2.0},
    2: {
        "gdpo/batch_norm_mean": 0.0,
        "gdpo/format/mean": 0.5,
        "gdpo/format/correlation_with_correctness": 0.1,
        "gdpo/correctness/mean": -1.0,
        "val-aux/rlla/format/mean@1": 0.75,
    },
}


def write_metrics(run, *starts):
    (run / "metrics").mkdir()
    for number, steps in enumerate(starts, 1):
        lines = [step_line(step, **data) for step, data in steps.items()]
        (run / "metrics" / f"{number}.jsonl").write_text("".join(lines))


def test_metrics_of_all_starts_are_read(tmp_path):
    write_metrics(tmp_path, {0: METRICS[0], 1: METRICS[1]}, {1: {"gdpo/format/mean": 0.3}})
    with open(tmp_path / "metrics" / "2.jsonl", "a") as file:
        file.write('{"step": 2, "da')  # verl is writing
    metrics = read_metrics(tmp_path)
    assert list(metrics) == [0, 1]
    assert training_rewards(metrics) == {"format": {1: 0.3}, "correctness": {1: -2.0}}
    assert validation_rewards(metrics) == {"format": {0: 0.2}}


def test_validation_of_several_sources_is_kept_apart():
    metrics = {0: {"val-aux/a/format/mean@1": 0.2, "val-aux/openai/gsm8k/format/mean@4": 0.4}}
    assert validation_rewards(metrics) == {
        "format (a)": {0: 0.2},
        "format (openai/gsm8k)": {0: 0.4},
    }


def test_table():
    assert reward_table(METRICS) == [
        ("format", "0.250", "0.500", "0.200", "0.750"),
        ("correctness", "-2.000", "-1.000", "-", "-"),
    ]
    lines = render(HEADER, reward_table(METRICS)).splitlines()
    assert " ".join(lines[0].split()) == "reward first step last step validation before after"
    assert len({len(line) for line in lines}) == 1


def test_summary_of_a_run(tmp_path):
    write_metrics(tmp_path, METRICS)
    done = subprocess.run(
        [sys.executable, "-m", "verl_gdpo", "summary", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "correctness" in done.stdout
    assert Path(tmp_path / "rewards.png").read_bytes().startswith(b"\x89PNG")


def run_launcher(folder, body, **options):
    command = [
        *(sys.executable, "-m", "verl_gdpo.launch", "--run-dir", str(folder), "--"),
        *driver(folder, body),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_a_driver_that_is_killed(tmp_path):
    done = run_launcher(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode != 0
    assert "the training process was ended by SIGKILL" in done.stderr.splitlines()[-1]
    assert not is_alive(child_of(tmp_path))


def test_a_disk_that_is_full(tmp_path):
    """RLIMIT_FSIZE stands for it: as on a full disk a write raises OSError, in the log too."""

    def no_file_above_64_kb():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))

    body = "[print('x' * 1000, flush=True) for _ in range(100)]"
    done = run_launcher(tmp_path, body, preexec_fn=no_file_above_64_kb)
    assert done.returncode != 0
    assert f"{tmp_path} cannot be written: [Errno 27]" in done.stderr.splitlines()[-1]


def test_other_ends_have_no_fault_from_outside(tmp_path):
    for exit_code in (1, 2, 124, 130, 143, -15, 255):
        assert faults_from_outside(tmp_path, exit_code) == []
