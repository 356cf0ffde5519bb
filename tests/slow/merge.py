"""What verl's FSDP engine saves from two ranks, also with LoRA, is merged without a loss.

Nobody has to trust it: its shards hold nothing but tensors.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_chat_model import make_chat_model

from verl_gdpo.tools.evaluate.policy import find_policy

ENGINE = Path(__file__).parents[1] / "help" / "checkpoint_engine.py"
LORA = ("model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=all-linear")


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [((), torch.float32), (LORA, torch.float32), (("model_dtype=bf16",), torch.bfloat16)],
    ids=["whole", "lora", "bfloat16"],
)
def test_two_ranks(tmp_path, settings, dtype):
    model = make_chat_model(tmp_path / "model", dtype=dtype)
    actor = tmp_path / "global_step_5" / "actor"
    case = ["save", str(actor), str(model), *settings]
    command = [sys.executable, "-W", "ignore", ENGINE, "2", json.dumps([case])]
    subprocess.run(command, check=True, timeout=300)
    policy = find_policy(tmp_path / "global_step_5")
    assert policy.step == 5
    merged, before = (load_file(one / "model.safetensors") for one in (policy.model, model))
    assert merged.keys() == before.keys()
    # the engine adds 1 to each parameter: of an adapter too, whose B is 0 before
    adapters = adapters_of(actor) if settings == LORA else {}
    for name, weight in before.items():
        added = adapters.get(name.removesuffix(".weight"), 0)
        assert merged[name].dtype == dtype
        assert torch.equal(merged[name], weight + 1 + added), name


def adapters_of(actor):
    """{layer: alpha / rank * B A}"""
    ranks = [
        torch.load(actor / f"model_world_size_2_rank_{rank}.pt", weights_only=True)
        for rank in (0, 1)
    ]
    whole = {
        name: torch.cat([rank[name].to_local() for rank in ranks])
        for name in ranks[0]
        if "lora_" in name
    }
    return {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight"): 2.0
        * (whole[name.replace("lora_A", "lora_B")] @ one)
        for name, one in whole.items()
        if "lora_A" in name
    }
