"""What is found of a machine's GPUs, which recipes fit them, and what they need besides."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from composed_recipes import composed
from executable import program
from omegaconf import OmegaConf
from repository import REPO

from verl_gdpo.tools.check import gpus, machine
from verl_gdpo.tools.check.gpus import (
    QWEN_1_5B,
    TASKS,
    Gpu,
    find_gpus,
    fitting,
    overrides_for,
    shape_of,
    used_of,
)
from workshop.benchmarks.gpu_tables import needed_gb

A100, L4, L40S, H200 = 81_920, 23_034, 46_068, 143_771  # MiB, as nvidia-smi says
A100_40, RTX_5090, B200, H20 = 40_960, 32_607, 183_359, 97_871


def made(*memory, driver="580.95.05", capability=(8, 0)):
    return [
        Gpu(str(i), f"GPU-{i}ab", "a GPU", mib, driver, capability) for i, mib in enumerate(memory)
    ]


def gb(mib):
    return mib * 2**20 / 1e9


@pytest.mark.parametrize(
    ("memory", "hardware", "away"),
    [
        ([A100], "hardware=1gpu", ""),
        ([A100_40], "hardware=1gpu", ""),
        ([RTX_5090], "hardware=1gpu", "offload_policy"),
        ([L4], "hardware=1gpu", "offload_policy"),
        ([L4] * 2, "hardware=8gpu trainer.n_gpus_per_node=2", ""),
        ([A100_40] * 4, "hardware=8gpu trainer.n_gpus_per_node=4", ""),
        ([L40S] * 6, "hardware=8gpu trainer.n_gpus_per_node=4", ""),
        ([A100, L40S, A100], "hardware=8gpu trainer.n_gpus_per_node=2", ""),
        ([L4] * 9, "hardware=8gpu", ""),
        ([H20] * 8, "hardware=8gpu", ""),
        ([B200] * 8, "hardware=8gpu", ""),
    ],
)
def test_what_is_chosen_leaves_no_doubts(memory, hardware, away):
    found = made(*memory)
    overrides = overrides_for("tool_rl", found, used_of(found))
    assert " ".join(overrides).startswith(hardware + " actor_rollout_ref.")
    config = composed(*overrides)
    gpu_gb = gb(min(memory))
    assert max(needed_gb(QWEN_1_5B, config, gpu_gb).values()) <= 0.941 * gpu_gb
    assert gpus.doubts(config, QWEN_1_5B, gpu_gb) == []
    fsdp = config.actor_rollout_ref.actor.fsdp_config
    offloads = [key for key in fsdp if "offload" in key and fsdp[key] is True]
    assert " ".join(offloads) == away
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization >= 0.3


def test_nothing_and_too_little():
    assert overrides_for("tool_rl", [], 0) == ["hardware=cpu"]
    with pytest.raises(ValueError, match=r"8 x a GPU of 16,384 MiB is too little for task=coding"):
        overrides_for("coding", made(*[16_384] * 8), 8)
    with pytest.raises(ValueError, match="2 GPUs are wanted, and 1 are here"):
        overrides_for("tool_rl", made(A100), 2)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("memory", [L4, RTX_5090, A100_40, L40S, A100, H20, H200, B200])
@pytest.mark.parametrize("task", TASKS)
def test_keys_leave_room(task, memory, count):
    """Of the longest row, and on the GPU as a whole, for all recipes' models."""
    shape, longest = TASKS[task]
    keys = fitting(shape, longest, count, gb(memory))
    if keys is None:
        assert (task, count) in {("coding", 1), ("coding", 2), ("coding", 4)} and memory < L40S
        return
    config = composed(f"task={task}", f"trainer.n_gpus_per_node={count}")
    for key, value in keys.items():
        OmegaConf.update(config, key, value)
    needed = needed_gb(shape, config, gb(memory))
    assert max(needed.values()) <= 0.941 * gb(memory)
    assert keys["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] >= longest


def test_shared_memory_that_is_too_small(monkeypatch):
    config = composed("task=coding", "hardware=8gpu")
    free = SimpleNamespace(free=64e6)
    monkeypatch.setattr(gpus.shutil, "disk_usage", lambda path: free)
    (problem,) = gpus.small_shared_memory(config)
    assert "/dev/shm: 0.06 GB free; expected at least 4.0 for vLLM" in problem
    free.free = 5e9
    assert gpus.small_shared_memory(config) == []


def test_the_shape_of_a_model_in_a_folder(tmp_path):
    from transformers import Qwen2Config

    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **sizes, **heads).save_pretrained(
        tmp_path
    )
    assert shape_of(str(tmp_path)) == QWEN_1_5B
    for name in ("no-one/not-in-the-cache", "/no/such/model", "./models/qwen", "hdfs://a/b/c"):
        assert shape_of(name) is None, name


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what it prints."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def prints(*found, code=0):
        lines = "\n".join(
            f"{g.index}, {g.uuid}, {g.name}, {g.memory_mib}, {g.driver}, "
            f"{g.capability[0]}.{g.capability[1]}, [N/A]"
            for g in found
        )
        text = f"#!/bin/sh\ncat <<'EOF'\n{lines}\nEOF\nexit {code}\n"
        program(tmp_path / "bin" / "nvidia-smi", text)

    return prints


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(gpus, "_devices", lambda: "")


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, "0123"),
        ("", ""),
        ("-1", ""),
        ("2", "2"),
        ("3,0", "30"),
        ("GPU-1a", "1"),
        ("1,7", "1"),
    ],
)
def test_gpus_that_are_visible(nvidia_smi, visible, seen):
    nvidia_smi(*made(A100, A100, A100, A100))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert "".join(gpu.index for gpu in find_gpus(environment)) == seen


@pytest.mark.parametrize(
    ("visible", "words"),
    [("7", "the GPUs here are a GPU"), ("MIG-0ab1", r"a part of a GPU \(MIG\)")],
)
def test_what_is_visible_cannot_be_used(nvidia_smi, visible, words):
    """Else the tiny policy would be trained in silence."""
    nvidia_smi(*made(A100))
    with pytest.raises(ValueError, match=words):
        find_gpus({"CUDA_VISIBLE_DEVICES": visible})


def test_no_nvidia_smi_or_a_broken_one(nvidia_smi, monkeypatch, no_device):
    nvidia_smi(code=9)
    assert find_gpus({}) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_gpus({}) == []
    monkeypatch.setattr(gpus, "_devices", lambda: "/dev/nvidia0: an NVIDIA GPU is here")
    with pytest.raises(ValueError, match=r"/dev/nvidia0: .* but nvidia-smi does not work"):
        find_gpus({})
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_mixed_gpus_are_as_small_as_the_smallest(nvidia_smi):
    nvidia_smi(*made(A100, L4))
    found = find_gpus({})
    assert overrides_for("tool_rl", found, 2) == overrides_for("tool_rl", made(L4, L4), 2)


def test_alone_before_anything_is_installed(nvidia_smi, tmp_path):
    nvidia_smi(*made(A100, driver="570.10"))
    done = subprocess.run(
        [sys.executable, "-I", str(REPO / "verl_gdpo/tools/check/gpus.py"), "gsm8k", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("", 1)
    assert "this machine: NVIDIA driver 570.10: expected 580 or newer" in done.stderr


def test_what_a_machine_lacks(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)
    monkeypatch.setattr(gpus.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(gpus.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e9))
    compiler, header, disk = gpus.missing(made(A100), tmp_path)
    assert "no C compiler" in compiler and "Python.h is not there" in header
    assert disk == f"{tmp_path}: 5 GB free; expected at least 60"
    monkeypatch.setattr(gpus.shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(gpus.shutil, "disk_usage", lambda _: SimpleNamespace(free=5e11))
    (tmp_path / "Python.h").touch()
    assert gpus.missing(made(A100), tmp_path) == []


def test_check_of_a_gpu_run(monkeypatch):
    """Through torch's answers, on a machine without a GPU."""
    config = composed("hardware=8gpu", "trainer.n_gpus_per_node=2")
    with pytest.raises(ValueError, match=r"n_gpus_per_node=2, but 0 GPUs are here.*--elsewhere"):
        gpus.check_gpus(config)
    assert gpus.check_gpus(composed("hardware=cpu")) == []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    size = SimpleNamespace(total_memory=A100_40 * 2**20, name="a GPU", major=8, minor=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: size)
    monkeypatch.setattr(gpus, "missing", lambda found, folder, disk_gb: [])
    monkeypatch.setattr(gpus, "shape_of", lambda path: None)
    assert gpus.check_gpus(config) == ["2 GPUs of 43 GB"]
    monkeypatch.setattr(gpus, "shape_of", lambda path: QWEN_1_5B)
    size.total_memory = A100 * 2**20
    assert gpus.check_gpus(config) == ["2 GPUs of 86 GB"]
    size.total_memory = L4 * 2**20
    _, doubt = gpus.check_gpus(config)
    assert doubt.startswith("1.54 B parameters on 2 x 24 GB may not fit (computed, not measured).")
    assert "What fits: actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384" in doubt
    size.total_memory = 8 * 10**9
    assert gpus.check_gpus(config)[1].endswith("What fits: more GPUs, or a smaller model")
    size.total_memory = A100 * 2**20
    monkeypatch.setattr(gpus, "missing", lambda found, folder, disk_gb: [f"{disk_gb:.0f}"])
    with pytest.raises(ValueError, match=r"^55\. "):  # 15, 3 and two checkpoints of 18.5 GB
        gpus.check_gpus(config)


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
