"""The NVIDIA GPUs of this machine, and what a training on them needs: memory, disk, a compiler.

    python3 verl_gdpo/tools/check/gpus.py [FOLDER]

prints the overrides of the recipes that fit, and ends with 1 and a line for each thing that is
missing. `run.sh` runs it before it installs or downloads anything, so what it imports at its top
is the standard library. FOLDER is where the environment, the model and the checkpoints will lie.

The memory is computed, not measured. Under FSDP2 every GPU keeps its share of the parameters, the
gradients and Adam's two moments in float32. The rest of a training pass is what gradient
checkpointing keeps, one layer computed again, the output layer as a whole, and a chunk of logits.
While vLLM generates, it takes `gpu_memory_utilization` of the GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QUERY = ("--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits")
# recipes/gpu_memory/NAME.yaml: the least that such a GPU has, in MiB (an L40S "of 48 GB": 46,068)
CLASSES = {"141gb": 138_000, "80gb": 79_000, "48gb": 44_000, "24gb": 22_000}
LEAST_DRIVER = 580  # of CUDA 13, for which vllm 0.24 and torch 2.11 are built
# of the recipes with the smallest model: environment 15, model 3, two checkpoints of 1.5 B 37
LEAST_DISK_GB = 60.0

CHUNK_TOKENS = 512  # of verl's fused kernels
CHUNK_COPIES = 5  # of a chunk of logits, in float32: logits, probabilities, one-hot, gradients
CONTEXT_GB = 3.0  # CUDA, NCCL, what vLLM keeps while it sleeps, fragmentation
LEAST_CACHE_GB = 4.0  # of vLLM beside its weights
# of the output layer: weights and gradients in bfloat16, and gradients once more in float32
WHOLE_LAYER_BYTES = 2 + 2 + 4


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    memory_mib: int
    driver: str


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; none where there is no working nvidia-smi."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *QUERY], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    found = []
    for line in done.stdout.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[3].isdecimal():  # not "No devices were found"
            found.append(Gpu(cells[0], cells[1], cells[2], int(cells[3]), cells[4]))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    wanted = [text.strip() for text in visible.split(",")]
    named = [[g for g in found if w and (w == g.index or g.uuid.startswith(w))] for w in wanted]
    return [gpus[0] for gpus in named if gpus]


def overrides_for(gpus: Sequence[Gpu]) -> list[str]:
    """The recipes' overrides for these GPUs; a power of two of them, up to 8, divides each batch.

    Raises:
        ValueError: a GPU is too small.
    """
    if not gpus:
        return ["hardware=cpu"]
    count = max(n for n in (1, 2, 4, 8) if n <= len(gpus))
    smallest = min(gpus, key=lambda gpu: gpu.memory_mib)
    fitting = [name for name, least in CLASSES.items() if smallest.memory_mib >= least]
    if not fitting:
        raise ValueError(
            f"GPU {smallest.name} has {smallest.memory_mib:,} MiB; expected at least "
            f"{CLASSES['24gb']:,}. hardware=cpu trains a tiny policy without a GPU"
        )
    if count == 1 and fitting[0] == "24gb":
        raise ValueError(
            f"one GPU {smallest.name} of {smallest.memory_mib:,} MiB: parameters, gradients and "
            "Adam's state of 1.5 B parameters take 24.7 GB in float32. Two GPUs of 24 GB or one of "
            "48 GB would do; hardware=cpu trains a tiny policy without a GPU"
        )
    hardware = "1gpu" if count == 1 else "8gpu"
    number = [] if count in (1, 8) else [f"trainer.n_gpus_per_node={count}"]
    return [f"hardware={hardware}", f"gpu_memory={fitting[0]}", *number]


def missing(gpus: Sequence[Gpu], folder: Path, disk_gb: float = LEAST_DISK_GB) -> list[str]:
    """What a training on these GPUs lacks on this machine, a sentence each."""
    problems = []
    drivers = sorted({gpu.driver for gpu in gpus})
    for driver in drivers:
        if int(driver.split(".")[0]) < LEAST_DRIVER:
            problems.append(
                f"NVIDIA driver {driver}: expected {LEAST_DRIVER} or newer, which CUDA 13 needs"
            )
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        problems.append("no C compiler: vLLM and Triton compile at run time. Install gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        problems.append(
            f"{header} is not there: Triton compiles with it at run time. Install "
            f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        )
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < disk_gb:
        problems.append(f"{folder}: {free_gb:.0f} GB free; expected at least {disk_gb:.0f}")
    return problems


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about its memory; `parameters` counts tied ones once."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int


def shape_of(path: str) -> ModelShape | None:
    """The shape of a language model in a folder or in the hub's cache; None if it is not there."""
    import torch
    from huggingface_hub import try_to_load_from_cache
    from transformers import AutoConfig, AutoModelForCausalLM

    file = Path(path).expanduser() / "config.json"
    cached = file if file.is_file() else try_to_load_from_cache(path, "config.json")
    if not isinstance(cached, str | Path):
        return None
    try:
        config = AutoConfig.from_pretrained(Path(cached).parent, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:  # of pictures too, or with code of its own
        return None
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
    )


def needed_gb(shape: ModelShape, config: Any, gpu_gb: float) -> Mapping[str, float]:
    """{phase: GB of one GPU} for verl's configuration, on GPUs of `gpu_gb`."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    share = shape.parameters / gpus / 1e9
    tokens = (config.data.max_prompt_length + config.data.max_response_length) * (
        actor.ppo_micro_batch_size_per_gpu or 1
    )
    if actor.use_dynamic_bsz:
        tokens = actor.ppo_max_token_len_per_gpu
    # bytes of a token: the input of each layer, and some 20 + 3 vectors of the layer in work
    kept = 2 * shape.layers * shape.hidden
    in_work = 2 * (20 * shape.hidden + 3 * shape.intermediate)
    logits = CHUNK_TOKENS * shape.vocabulary * 4 * CHUNK_COPIES
    if not config.actor_rollout_ref.model.use_fused_kernels:
        logits = tokens * shape.vocabulary * 2 * 3  # in bfloat16, with softmax and gradient
    states = 0.0 if actor.fsdp_config.offload_policy else 16 * share
    whole = WHOLE_LAYER_BYTES * shape.vocabulary * shape.hidden
    update = states + (tokens * (kept + in_work) + whole + logits) / 1e9 + CONTEXT_GB
    waiting = 0 if actor.fsdp_config.param_offload else 4 * share
    waiting += 0 if actor.fsdp_config.optimizer_offload else 8 * share
    waiting = 0 if actor.fsdp_config.offload_policy else waiting
    weights = 2 * shape.parameters / rollout.tensor_model_parallel_size / 1e9
    for_vllm = max(rollout.gpu_memory_utilization * gpu_gb, weights + LEAST_CACHE_GB)
    return {"update": update, "rollout": for_vllm + waiting + CONTEXT_GB}


def needed_disk_gb(shape: ModelShape) -> float:
    """The environment, the weights, and two checkpoints: parameters and Adam's state in float32."""
    return 15 + (2 + 2 * 12) * shape.parameters / 1e9


def memory_problems(needed: Mapping[str, float], gpu_gb: float) -> list[str]:
    """A sentence for each phase that does not fit, with what would help."""
    remedies = {
        "update": "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu, more GPUs, or "
        "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
        "rollout": "actor_rollout_ref.rollout.gpu_memory_utilization, more GPUs, or "
        "actor_rollout_ref.actor.fsdp_config.{param_offload,optimizer_offload}=True",
    }
    return [
        f"a GPU of {gpu_gb:.0f} GB is too small for the {phase}, which needs about {gb:.0f} GB "
        f"(computed). What helps: gpu_memory=24gb or the like, a lower {remedies[phase]}"
        for phase, gb in needed.items()
        if gb > gpu_gb
    ]


def check_gpus(config: Any) -> list[str]:
    """What is said of the GPUs that a run on `trainer.device=cuda` would use.

    Raises:
        ValueError: there are too few, they are too small, or the machine lacks what they need.
    """
    if config.trainer.device != "cuda":
        return []
    import torch

    wanted, found = config.trainer.n_gpus_per_node, torch.cuda.device_count()
    if found < wanted:
        build = "" if torch.version.cuda else f" (torch {torch.__version__} is without CUDA)"
        raise ValueError(
            f"trainer.n_gpus_per_node={wanted}, but {found} GPUs are here{build}. If the run will "
            "be on another machine: --elsewhere. Our recipes run without a GPU: hardware=cpu and "
            "VERL_PLATFORM=cpu"
        )
    there = first_that_exists(Path(str(config.trainer.default_local_dir)))
    is_fsdp = str(config.actor_rollout_ref.actor.strategy).startswith("fsdp")
    shape = shape_of(str(config.actor_rollout_ref.model.path)) if is_fsdp else None
    disk_gb = needed_disk_gb(shape) if shape else LEAST_DISK_GB
    problems = missing(find_gpus(os.environ), there, disk_gb)
    gpu_gb = min(torch.cuda.get_device_properties(i).total_memory for i in range(wanted)) / 1e9
    remark = f"{found} GPUs of {gpu_gb:.0f} GB"
    if shape is None:
        reason = "no language model is here yet" if is_fsdp else "the strategy is not FSDP"
        remark += f"; {reason}, so what it needs of them is not known"
    else:
        needed = needed_gb(shape, config, gpu_gb)
        problems += memory_problems(needed, gpu_gb)
        phases = ", ".join(f"{gb:.0f} GB in the {phase}" for phase, gb in needed.items())
        remark += f"; {shape.parameters / 1e9:.2f} B parameters need about {phases} (computed)"
    if problems:
        raise ValueError("; ".join(problems))
    return [remark]


def first_that_exists(path: Path) -> Path:
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())


def main(arguments: Sequence[str]) -> int:
    """Print the overrides; return 1 if something is missing."""
    folder = Path(arguments[0]) if arguments else Path()
    gpus = find_gpus(os.environ)
    try:
        overrides = overrides_for(gpus)
        problems = missing(gpus, folder) if gpus else []
    except ValueError as error:
        overrides, problems = [], [str(error)]
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    print(f"found {len(gpus)} GPUs{f' ({names})' if names else ''}", file=sys.stderr)
    for problem in problems:
        print(f"this machine: {problem}", file=sys.stderr)
    print(" ".join(overrides))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
