"""verl's fused kernels under FSDP2, on two ranks, against the model without either."""

import os
import socket
import subprocess
import sys

import pytest
from repository import REPO


@pytest.mark.slow
def test_log_probs_and_gradients_are_those_of_the_plain_model(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = REPO / "tests/help/fused_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, tmp_path],
            env={**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    worst = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert {*worst} == {
        f"{model}-{rank}" for model in ("tied", "untied", "lora") for rank in (0, 1)
    }
    assert max(worst.values()) < 1e-5, worst
