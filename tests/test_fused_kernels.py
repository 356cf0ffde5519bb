"""verl's fused kernels under FSDP2, on two ranks, against the model without either."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_log_probs_and_gradients_are_those_of_the_plain_model(tmp_path, embeddings):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = Path(__file__).with_name("fused_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), port, tmp_path, embeddings],
            env={**os.environ, "VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    worst = [float((tmp_path / f"{rank}.txt").read_text()) for rank in range(2)]
    assert max(worst) < 1e-5
