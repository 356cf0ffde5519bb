"""What is found of a machine's GPUs, which recipes fit them, and what they need besides."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from composed_recipes import composed
from executable import program
from repository import REPO

from verl_gdpo.tools.check import gpus, machine
from verl_gdpo.tools.check.gpus import (
    CLASSES,
    Gpu,
    ModelShape,
    find_gpus,
    memory_problems,
    needed_gb,
    overrides_for,
    shape_of,
)

QWEN_1_5B = ModelShape(1_543_714_304, layers=28, hidden=1536, intermediate=8960, vocabulary=151936)
A100, L4, L40S, H200 = 81_920, 23_034, 46_068, 143_771  # MiB, as nvidia-smi says


def made(*memory, driver="580.95.05"):
    return [Gpu(str(i), f"GPU-{i}ab", "a GPU", mib, driver) for i, mib in enumerate(memory)]


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ([], "hardware=cpu"),
        ([A100], "hardware=1gpu gpu_memory=80gb"),
        ([H200] * 8, "hardware=8gpu gpu_memory=141gb"),
        ([L4] * 9, "hardware=8gpu gpu_memory=24gb"),
        ([40_960] * 2, "hardware=8gpu gpu_memory=24gb trainer.n_gpus_per_node=2"),
        ([L40S] * 5, "hardware=8gpu gpu_memory=48gb trainer.n_gpus_per_node=4"),
        ([A100, L40S, A100], "hardware=8gpu gpu_memory=48gb trainer.n_gpus_per_node=2"),
    ],
)
def test_which_recipes_fit(memory, expected):
    overrides = overrides_for(made(*memory))
    assert " ".join(overrides) == expected
    composed(*overrides)


@pytest.mark.parametrize(
    ("memory", "words"), [([16_384] * 8, "16,384 MiB"), ([L4], "Two GPUs of 24 GB or one of 48")]
)
def test_gpus_that_are_too_small(memory, words):
    with pytest.raises(ValueError, match=words):
        overrides_for(made(*memory))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_what_is_chosen_is_what_is_computed_to_fit(name, count):
    """The two ways to say no agree: of the choice before, and of the check after, the download."""
    least_gb = CLASSES[name] * 2**20 / 1e9
    choice = (f"hardware={'1gpu' if count == 1 else '8gpu'}", f"gpu_memory={name}")
    config = composed(*choice, f"trainer.n_gpus_per_node={count}")
    fits = not memory_problems(needed_gb(QWEN_1_5B, config, least_gb), least_gb)
    try:
        fits_before = bool(overrides_for(made(*[CLASSES[name]] * count)))
    except ValueError:
        fits_before = False
    assert fits == fits_before == ((name, count) != ("24gb", 1))


def test_what_lowers_the_memory():
    base = ("hardware=1gpu", "gpu_memory=80gb")
    rollout = "actor_rollout_ref.rollout.gpu_memory_utilization"
    fsdp = "actor_rollout_ref.actor.fsdp_config"

    def needs(*overrides):
        return needed_gb(QWEN_1_5B, composed(*base, *overrides), 85.9)

    assert needs() == pytest.approx({"update": 36.1, "rollout": 64.5}, abs=0.05)
    assert needs("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144")["update"] < 34
    assert needs(f"{rollout}=0.3")["rollout"] == pytest.approx(64.5 - 0.2 * 85.9, abs=0.05)
    assert needs(f"{rollout}=0.01")["rollout"] > 3.1 + 4  # its weights, and some cache
    offloaded = needs(f"{fsdp}.optimizer_offload=true", f"{fsdp}.param_offload=true")
    assert offloaded["rollout"] == pytest.approx(64.5 - 12 * 1.5437, abs=0.05)
    assert needs(f"{fsdp}.offload_policy=true")["update"] == pytest.approx(36.1 - 24.7, abs=0.05)
    assert needs("actor_rollout_ref.model.use_fused_kernels=false")["update"] > 45
    assert needs("trainer.n_gpus_per_node=8")["update"] < 18


def test_the_shape_of_a_model_in_a_folder(tmp_path):
    from transformers import Qwen2Config

    sizes = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2}
    Qwen2Config(vocab_size=151936, tie_word_embeddings=True, **sizes, **heads).save_pretrained(
        tmp_path
    )
    assert shape_of(str(tmp_path)) == QWEN_1_5B
    assert shape_of("no-one/not-in-the-cache") is None


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Sets what it prints."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def prints(*found, code=0):
        lines = "\n".join(
            f"{g.index}, {g.uuid}, {g.name}, {g.memory_mib}, {g.driver}" for g in found
        )
        text = f"#!/bin/sh\ncat <<'EOF'\n{lines}\nEOF\nexit {code}\n"
        program(tmp_path / "bin" / "nvidia-smi", text)

    return prints


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, "0123"), ("", ""), ("-1", ""), ("2", "2"), ("3,0", "30"), ("GPU-1a", "1"), ("7", "")],
)
def test_gpus_that_are_visible(nvidia_smi, visible, seen):
    nvidia_smi(*made(A100, A100, A100, A100))
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert "".join(gpu.index for gpu in find_gpus(environment)) == seen


def test_no_nvidia_smi_or_a_broken_one(nvidia_smi, monkeypatch):
    nvidia_smi(code=9)
    assert find_gpus({}) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_gpus({}) == []


def run_alone(folder):
    return subprocess.run(
        [sys.executable, "-I", str(REPO / "verl_gdpo/tools/check/gpus.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_alone_before_anything_is_installed(nvidia_smi, tmp_path):
    nvidia_smi()
    done = run_alone(tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("hardware=cpu\n", "found 0 GPUs\n", 0)
    nvidia_smi(*made(A100, driver="570.10"))
    done = run_alone(tmp_path)
    assert done.returncode == 1
    assert "this machine: NVIDIA driver 570.10: expected 580 or newer" in done.stderr
    nvidia_smi(*made(L4))
    done = run_alone(tmp_path)
    assert (done.stdout, done.returncode) == ("\n", 1)
    assert "Two GPUs of 24 GB" in done.stderr


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
    config = composed("hardware=8gpu", "gpu_memory=24gb", "trainer.n_gpus_per_node=2")
    with pytest.raises(ValueError, match=r"n_gpus_per_node=2, but 0 GPUs are here.*--elsewhere"):
        gpus.check_gpus(config)
    assert gpus.check_gpus(composed("hardware=cpu")) == []
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    size = SimpleNamespace(total_memory=L4 * 2**20)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda i: size)
    monkeypatch.setattr(gpus, "missing", lambda found, folder, disk_gb: [])
    monkeypatch.setattr(gpus, "shape_of", lambda path: None)
    (remark,) = gpus.check_gpus(config)
    assert "2 GPUs of 24 GB; no language model is here yet" in remark
    monkeypatch.setattr(gpus, "shape_of", lambda path: QWEN_1_5B)
    (remark,) = gpus.check_gpus(config)
    assert "1.54 B parameters need about 21 GB in the update, 15 GB in the rollout" in remark
    alone = composed("hardware=1gpu", "gpu_memory=24gb")
    with pytest.raises(ValueError, match=r"too small for the update, which needs about 34 GB"):
        gpus.check_gpus(alone)
    monkeypatch.setattr(gpus, "missing", lambda found, folder, disk_gb: [f"{disk_gb:.0f}"])
    with pytest.raises(ValueError, match=r"^55$"):  # 15, 3 and two checkpoints of 18.5 GB
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
