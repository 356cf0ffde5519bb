"""verl's fused kernels under FSDP2, on two ranks, against the model without either."""

import pytest
from two_ranks import run_two_ranks


@pytest.mark.slow
def test_log_probs_and_gradients_are_those_of_the_plain_model(tmp_path):
    run_two_ranks("fused_rank.py", tmp_path)
    worst = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert {*worst} == {
        f"{model}-{rank}" for model in ("tied", "untied", "lora") for rank in (0, 1)
    }
    assert max(worst.values()) < 1e-5, worst
