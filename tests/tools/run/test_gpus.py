"""What is found of a machine's GPUs, and which keys they get."""

import os

import pytest
from composed_recipes import RECIPES, composed
from executable import program
from processes import completed
from repository import REPO

from verl_gdpo.tools.check import machine
from verl_gdpo.tools.run import gpus
from verl_gdpo.tools.run.gpus import (
    CARDS_GB,
    COUNTS,
    MODEL_OF_TASK,
    TOKENS,
    Gpu,
    Keys,
    find_gpus,
    keys_for,
    main,
    overrides_for,
    used_of,
)

A100, L4, L40S, H200 = 81_920, 23_034, 46_068, 143_771  # MiB, as nvidia-smi says
A100_40, RTX_5090, B200, H20 = 40_960, 32_607, 183_359, 97_871


def made(*memory):
    return [Gpu(str(i), f"GPU-{i}ab", "a GPU", mib) for i, mib in enumerate(memory)]


@pytest.mark.parametrize(
    ("task", "memory", "hardware", "keys"),
    [
        ("tool_rl", [A100], "1gpu", Keys()),
        ("tool_rl", [A100_40], "1gpu", Keys(vllm_share=0.43)),
        ("tool_rl", [RTX_5090], "1gpu", Keys(adam_on_cpu=True)),
        ("tool_rl", [L4] * 2, "8gpu trainer.n_gpus_per_node=2", Keys(16_384, 0.43)),
        ("gsm8k", [L40S] * 6, "8gpu trainer.n_gpus_per_node=4", Keys()),
        ("gsm8k", [A100, L4, A100], "8gpu trainer.n_gpus_per_node=2", Keys(16_384, 0.43)),
        ("math_length", [A100_40], "1gpu", Keys(15_360, 0.37)),
        ("coding", [L4] * 9, "8gpu", Keys(15_360, 0.79, adam_on_cpu=True)),
        ("coding", [H200], "1gpu", Keys(9216, 0.31)),
        ("coding", [H20] * 2, "8gpu trainer.n_gpus_per_node=2", Keys(adam_on_cpu=True)),
        ("coding", [B200] * 8, "8gpu", Keys()),
    ],
)
def test_the_overrides_of_a_machine(task, memory, hardware, keys):
    choice, *overrides = overrides_for(task, made(*memory), used_of(len(memory)))
    number = overrides.pop(0) if "n_gpus" in overrides[0] else ""
    assert f"{choice} {number}".strip() == f"hardware={hardware}"
    config = composed(f"task={task}", *overrides)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    offload_policy = actor.fsdp_config.offload_policy
    tokens = actor.ppo_max_token_len_per_gpu
    assert Keys(tokens, rollout.gpu_memory_utilization, offload_policy) == keys
    assert (actor.fsdp_config.param_offload, actor.fsdp_config.optimizer_offload) == (False,) * 2


def test_every_micro_batch_holds_the_longest_row():
    for task, billions in MODEL_OF_TASK.items():
        data = composed(f"task={task}").data
        keys = [keys_for(billions, n, card * 1024) for n in COUNTS for card in CARDS_GB]
        assert min(k.tokens for k in keys) >= data.max_prompt_length + data.max_response_length


def test_the_table_in_the_document():
    text = (RECIPES / "README.md").read_text()
    for key, value in Keys().overrides().items():
        assert key.rpartition(".")[2] in text and f"| `{value}` |" in text


def test_nothing_and_too_few():
    assert overrides_for("tool_rl", [], 0) == ["hardware=cpu"]
    with pytest.raises(ValueError, match="2 GPUs are wanted, and 1 are here"):
        overrides_for("tool_rl", made(A100), 2)


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what it prints."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def prints(*found, code=0):
        lines = "\n".join(f"{g.index}, {g.uuid}, {g.name}, {g.memory_mib}" for g in found)
        text = f"#!/bin/sh\ncat <<'EOF'\n{lines}\nEOF\nexit {code}\n"
        program(tmp_path / "bin" / "nvidia-smi", text)

    return prints


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, "0123"),
        ("", ""),
        ("-1", ""),
        ("NoDevFiles", ""),
        ("2", "2"),
        ("3,0", "30"),
        ("GPU-1a", "1"),
        ("1,7", "1"),
    ],
)
def test_gpus_that_are_visible(nvidia_smi, visible, indices):
    nvidia_smi(*made(A100, A100, A100, A100))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert "".join(gpu.index for gpu in find_gpus(environment)) == indices


@pytest.mark.parametrize("visible", ["7", "MIG-0ab1"])
def test_what_is_visible_cannot_be_used(nvidia_smi, visible):
    """Else the tiny policy would be trained in silence."""
    nvidia_smi(*made(A100))
    with pytest.raises(ValueError, match="the GPUs here are a GPU"):
        find_gpus({"CUDA_VISIBLE_DEVICES": visible})


def test_no_nvidia_smi_or_a_broken_one(nvidia_smi, monkeypatch):
    monkeypatch.setattr(gpus, "_has_device", lambda: False)
    nvidia_smi(code=9)
    assert find_gpus({}) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_gpus({}) == []
    monkeypatch.setattr(gpus, "_has_device", lambda: True)
    with pytest.raises(ValueError, match="a GPU is in /dev, but nvidia-smi does not work"):
        find_gpus({})
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_alone_before_anything_is_installed(nvidia_smi):
    nvidia_smi(*made(A100))
    done = completed("-I", REPO / "verl_gdpo/tools/run/gpus.py", "gsm8k", "")
    assert done.returncode == 0 and done.stdout.startswith(f"hardware=1gpu {TOKENS}=24576 ")


def test_too_few_gpus():
    with pytest.raises(ValueError, match=r"n_gpus_per_node=2, but 0 GPUs are here.*--elsewhere"):
        machine.check_gpus(composed("hardware=8gpu", "trainer.n_gpus_per_node=2"))
    machine.check_gpus(composed("hardware=cpu"))


def test_engines_that_are_not_installed(monkeypatch):
    """verl itself would say so minutes later, in a worker's log."""
    there = set()
    monkeypatch.setattr(machine, "find_spec", lambda name: name in there or None)
    both = composed("hardware=8gpu", "attention=flash_attn")
    vllm, flash_attn = machine.missing_packages(both)
    assert vllm.startswith("actor_rollout_ref.rollout.name=vllm: vllm is not installed here")
    assert "flash-attn is not installed here. Set it to auto" in flash_attn
    assert machine.missing_packages(composed("hardware=8gpu")) == [vllm]
    attention = "actor_rollout_ref.model.override_config.attn_implementation"
    unsaid = composed("hardware=8gpu", f"~{attention}")
    assert machine.missing_packages(unsaid) == [vllm, flash_attn]
    assert machine.missing_packages(composed("hardware=cpu")) == []
    assert machine.missing_packages(composed("hardware=cpu", "rollout_engine=vllm_cpu")) == [vllm]
    there |= {"vllm", "flash_attn"}
    assert machine.missing_packages(both) == []


@pytest.mark.parametrize("wanted", ["0", "all", "-1", "1.5"])
def test_a_number_of_gpus_that_is_none(nvidia_smi, capsys, wanted):
    nvidia_smi(*made(A100))
    assert main(["tool_rl", wanted]) == 1
    said = capsys.readouterr()
    expected = f"trainer.n_gpus_per_node={wanted}: expected a number, such as 1, 2, 4, 8"
    assert expected in said.err and said.out == ""


def test_keys_of_memory_come_with_a_warning(nvidia_smi, capsys):
    nvidia_smi(*made(A100))
    assert main(["tool_rl", ""]) == 0
    assert "the keys of memory were computed" in capsys.readouterr().err
