"""What `python -m workshop.benchmarks run` makes of the script's output and of a run's metrics."""

import sys

import pytest

from workshop.benchmarks import coding
from workshop.benchmarks.run import parts_of_steps, stages_of, timed

SCRIPT = """
import subprocess, sys, time
for line in {lines!r}:
    print(line, flush=True)
    time.sleep(.05)
subprocess.run([sys.executable, "-c", "import time; x = b'x' * 50_000_000; time.sleep(1)"])
"""
LINES = [
    (0.0, "== the environment"),
    (1.0, "== the data: made once, and again when what makes it changes"),
    (3.0, "made 400 rows"),
    (3.5, "== the tiny policy: cached"),
    (4.0, "== training; verl needs a minute or two to start. Everything it prints: x"),
    (4.0, "== checking the configuration meanwhile; a problem ends the run"),
    (9.0, "correctness  0.1"),
    (24.0, "[   20 s] starting Ray, the policy and its servers ..."),
    (64.0, "[   60 s] step    0  validation"),
    (70.0, "[   66 s] step    1  correctness 0.100"),
    (400.0, "[  396 s] step   60  correctness 1.000  "),
    (402.0, ""),
    (402.0, "            first  last"),
    (403.0, "== end"),
]


def test_stages_of_a_run():
    assert stages_of(LINES) == {
        "the environment": 1.0,
        "the data": 2.5,
        "the tiny policy": 0.5,
        "verl starts": 60.0,
        "verl trains": 338.0,
        "the table": 1.0,
    }


def test_parts_of_all_steps():
    metrics = {
        1: {
            "timing_s/gen": 2.0,
            "timing_s/ref": 3.0,
            "timing_s/step": 6.0,
            "timing_per_token/x": 9,
        },
        2: {"timing_s/gen": 2.5, "timing_s/step": 4.0, "timing_s/testing": 1.0},
    }
    assert list(parts_of_steps(metrics).items()) == [("gen", 4.5), ("ref", 3.0), ("testing", 1.0)]


def test_a_script_is_timed_and_weighed(capfd, monkeypatch):
    monkeypatch.setattr("workshop.benchmarks.run.MEMORY_SECONDS", 0.1)
    lines = [line for _, line in LINES[1:-1]]
    stages, memory = timed([sys.executable, "-c", SCRIPT.format(lines=lines)])
    assert [*stages] == [*stages_of(LINES)]
    assert memory > 50e6
    assert "step   60" in capfd.readouterr().out
    with pytest.raises(RuntimeError, match="exit code 3"):
        timed([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_programs_of_a_step():
    # 819.2 of 10 s and 7,372.8 of 0.1 s are 8,192 + 737.28 s, on 64 cores
    assert coding.step_seconds(0.1, 10.0) == pytest.approx((8192 + 737.28) / 64)
