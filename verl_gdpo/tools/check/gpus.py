"""The GPUs of this machine, and what a training on them needs: memory, disk, a compiler.

    python3 verl_gdpo/tools/check/gpus.py TASK [FOLDER [COUNT [KEY=VALUE ...]]]

prints the overrides that fit, and ends with 1 and a line for each thing that is missing. `run.sh`
runs it before it installs or downloads anything, so what it imports at its top is the standard
library. FOLDER is where the environment, the model and the checkpoints will lie, and COUNT how many
GPUs are wanted. KEY=VALUE are the command's own overrides: for a task that is not in `TASKS`, they
have to have the keys of memory, or to say `--resume`, as the run that goes on has them.

The memory is computed, not measured, so nothing is refused for it but what no offloading would
let run. Under FSDP2 every GPU keeps its share of the parameters, the
gradients and Adam's two moments in float32. The rest of a training pass is what is gathered of the
others' shares, what gradient checkpointing keeps, one layer computed again, and a chunk of logits.
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

FIELDS = "index,uuid,name,memory.total,driver_version,compute_cap,mig.mode.current"
LEAST_DRIVER = 580  # of CUDA 13, for which vllm 0.24 and torch 2.11 are built
LEAST_CAPABILITY = (8, 0)  # bfloat16
# of the recipes with the smallest model: environment 15, model 3, two checkpoints of 1.5 B 37
LEAST_DISK_GB = 60.0
GO_ON = "VERL_GDPO_ANY_MACHINE"  # with 1, what the machine lacks is only said
COUNTS = (1, 2, 4, 8)  # they divide each batch of the recipes

CHUNK_TOKENS = 512  # of verl's fused kernels
CHUNK_COPIES = 5  # of a chunk of logits, in float32: logits, probabilities, one-hot, gradients
CONTEXT_GB = 3.0  # CUDA, NCCL, what vLLM keeps while it sleeps
FREE_SHARE = 0.06  # of a GPU, for fragmentation and for what is computed wrongly
LEAST_CACHE_GB = 4.0  # of vLLM beside its weights
VLLM_SHARES = (0.3, 0.5)  # of a GPU: enough to be quick, and more than which helps little
MOST_TOKENS = 24_576  # of a micro-batch, as in verl's own examples
SHARED_MEMORY_GB = 0.5  # of a vLLM server, in /dev/shm

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
OFFLOADS = tuple(f"{ACTOR}.fsdp_config.{what}_offload" for what in ("param", "optimizer"))
OFFLOAD_POLICY = f"{ACTOR}.fsdp_config.offload_policy"  # FSDP2's own: Adam runs on the CPU
VLLM_SHARE = f"{ROLLOUT}.gpu_memory_utilization"


# --- which ones ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    memory_mib: int
    driver: str  # "" if torch has found the GPU, whatever the driver
    capability: tuple[int, int]


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves.

    Raises:
        ValueError: there is a GPU, but it cannot be used or nothing is known of it.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    if visible and "MIG-" in visible:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible} is a part of a GPU (MIG), which the recipes do not "
            "know. Give the memory's keys yourself, as in recipes/README.md"
        )
    try:
        query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        if devices := _devices():
            raise ValueError(f"{devices}, but nvidia-smi does not work: {error}") from None
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    found = [_gpu(row) for row in rows if len(row) == FIELDS.count(",") + 1]
    if not found and (devices := _devices()):
        raise ValueError(f"{devices}, but nvidia-smi shows none: {done.stdout.strip()}")
    if visible is None:
        return found
    chosen = []
    for text in (text.strip() for text in visible.split(",")):
        named = [g for g in found if text and (text == g.index or g.uuid.startswith(text))]
        if not named:  # CUDA does not see those behind it either
            break
        chosen.append(named[0])
    if not chosen and found:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}, but the GPUs here are {_names(found)}")
    return chosen


def _gpu(row: Sequence[str]) -> Gpu:
    index, uuid, name, memory, driver, capability, mig = row
    if mig == "Enabled":  # its memory is that of all parts
        raise ValueError(
            f"GPU {name} is cut into parts (MIG), which the recipes do not know. Give the memory's "
            "keys yourself, as in recipes/README.md"
        )
    try:
        major, minor = map(int, capability.split("."))
        return Gpu(index, uuid, name, int(memory), driver, (major, minor))
    except ValueError:  # as "[N/A]", where memory is shared with the CPU
        raise ValueError(
            f"GPU {name}: nvidia-smi says memory {memory} and compute capability {capability}. "
            "Give the memory's keys yourself, as in recipes/README.md"
        ) from None


def _devices() -> str:
    """What says that there is a GPU where nvidia-smi says nothing."""
    for pattern, what in (("dev/nvidia[0-9]*", "an NVIDIA GPU"), ("dev/dxg", "WSL2's GPU")):
        for device in Path("/").glob(pattern):
            return f"/{device.relative_to('/')}: {what} is here"
    for node in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id"):
        if node.read_text().strip() != "0":
            return "/dev/kfd: an AMD GPU is here, and ROCm is not supported by the recipes"
    return ""


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(sorted({gpu.name for gpu in gpus}))


def missing(gpus: Sequence[Gpu], folder: Path, disk_gb: float = LEAST_DISK_GB) -> list[str]:
    """What a training on these GPUs lacks on this machine, a sentence each."""
    problems = [
        f"NVIDIA driver {driver}: expected {LEAST_DRIVER} or newer, which CUDA 13 needs"
        for driver in sorted({gpu.driver for gpu in gpus} - {""})
        if int(driver.split(".")[0]) < LEAST_DRIVER
    ]
    problems += [
        f"GPU {gpu.name}: compute capability {gpu.capability[0]}.{gpu.capability[1]}; expected "
        f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or more, which bfloat16 needs"
        for gpu in {gpu.name: gpu for gpu in gpus}.values()
        if gpu.capability < LEAST_CAPABILITY
    ]
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


# --- what fits -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides about its memory; `parameters` counts tied ones once."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    tied: bool  # one matrix for the embeddings and the output

    @property
    def ends(self) -> int:
        """Parameters of the embeddings and of the output."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden


QWEN_1_5B = ModelShape(1_543_714_304, 28, 1536, 8960, 151_936, tied=True)
DEEPSEEK_1_5B = ModelShape(1_777_088_000, 28, 1536, 8960, 151_936, tied=False)
DEEPSEEK_7B = ModelShape(7_615_616_512, 28, 3584, 18_944, 152_064, tied=False)
# {recipes/task: its model, and the tokens of its longest row}
TASKS = {
    "tool_rl": (QWEN_1_5B, 3072),
    "gsm8k": (QWEN_1_5B, 1536),
    "math_length": (DEEPSEEK_1_5B, 9024),
    "coding": (DEEPSEEK_7B, 9024),
}


def token_gb(shape: ModelShape) -> float:
    """Of a token of a micro-batch: the input of each layer, and some 23 vectors of the one at work.

    Of those, 20 are as wide as the model and 3 as wide as its inner layer, all in bfloat16.
    """
    kept = 2 * shape.layers * shape.hidden
    return (kept + 2 * (20 * shape.hidden + 3 * shape.intermediate)) / 1e9


def update_gb(shape: ModelShape, gpus: int, *, state_bytes: int = 16) -> float:
    """Of one GPU in the update, without the tokens.

    Args:
        state_bytes: of a parameter, its gradient and Adam's moments, in float32.
    """
    states = state_bytes * shape.parameters / gpus
    layer = (shape.parameters - shape.ends) / shape.layers
    # gathered in bfloat16, and gradients in bfloat16 and, to be reduced, in float32
    gathered = (2 + 2 + 4) * shape.ends + (2 * 2 + 2 + 4) * layer
    logits = CHUNK_TOKENS * shape.vocabulary * 4 * CHUNK_COPIES
    return (states + gathered + logits) / 1e9 + CONTEXT_GB


def fitting(shape: ModelShape, longest: int, gpus: int, gpu_gb: float) -> dict[str, Any] | None:
    """Keys of verl that fit on GPUs of `gpu_gb`, with as little offloading as goes; or None."""
    room = (1 - FREE_SHARE) * gpu_gb
    weights_gb = 2 * shape.parameters / 1e9
    for state_bytes, waiting_bytes, away in (
        (16, 12, {}),
        (16, 0, dict.fromkeys(OFFLOADS, True)),
        (0, 0, {OFFLOAD_POLICY: True}),
    ):
        free = room - update_gb(shape, gpus, state_bytes=state_bytes)
        tokens = int(free / token_gb(shape)) // 1024 * 1024
        waiting_gb = waiting_bytes * shape.parameters / gpus / 1e9
        least, most = (max(s * gpu_gb, weights_gb + LEAST_CACHE_GB) for s in VLLM_SHARES)
        for_vllm = min(room - CONTEXT_GB - waiting_gb, most)
        if tokens >= longest and for_vllm >= least:
            share = int(100 * for_vllm / gpu_gb) / 100
            keys = {TOKENS: min(tokens, MOST_TOKENS), VLLM_SHARE: share}
            return {**keys, **dict.fromkeys((*OFFLOADS, OFFLOAD_POLICY), False), **away}
    return None


def used_of(gpus: Sequence[Gpu]) -> int:
    """How many of them divide each batch of the recipes."""
    return max((n for n in COUNTS if n <= len(gpus)), default=0)


def overrides_for(task: str, gpus: Sequence[Gpu], count: int, *given: str) -> list[str]:
    """The overrides for `count` of these GPUs and the recipe's model.

    Args:
        given: the overrides of the command.

    Raises:
        ValueError: they are too few or too small, or nothing is known of the task's model.
    """
    if not gpus:
        return ["hardware=cpu"]
    if count > len(gpus):
        raise ValueError(f"{count} GPUs are wanted, and {len(gpus)} are here")
    number = [] if count in (1, 8) else [f"trainer.n_gpus_per_node={count}"]
    hardware = [f"hardware={'1gpu' if count == 1 else '8gpu'}", *number]
    smallest = min(gpus, key=lambda gpu: gpu.memory_mib)
    if task not in TASKS:
        _ask_for_sizes(task, given)
        return hardware
    shape, longest = TASKS[task]
    keys = fitting(shape, longest, count, smallest.memory_mib * 2**20 / 1e9)
    if keys is None:
        raise ValueError(
            f"{count} x {smallest.name} of {smallest.memory_mib:,} MiB is too little for "
            f"task={task}, whose model has {shape.parameters / 1e9:.1f} B parameters: its update "
            f"takes {update_gb(shape, count, state_bytes=0) + longest * token_gb(shape):.0f} GB of "
            "each GPU even if parameters and Adam's state are on the CPU (computed). hardware=cpu "
            "trains a tiny policy without a GPU"
        )
    return [*hardware, *(f"{key}={value}" for key, value in keys.items())]


def _ask_for_sizes(task: str, given: Sequence[str]) -> None:
    """Raise ValueError unless the command has the keys of memory, or a run that goes on has."""
    keys = {override.lstrip("+").partition("=")[0] for override in given}
    if "--resume" not in keys and not {TOKENS, VLLM_SHARE} <= keys:
        raise ValueError(
            f"the size of the model of task={task} is not known here. Give {TOKENS}=N (tokens of a "
            f"micro-batch: at least the longest row) and {VLLM_SHARE}=X (vLLM's share of a GPU, "
            "such as 0.5); for a large model, also the other keys of memory in recipes/README.md"
        )


# --- what a configuration needs ------------------------------------------------------------------


def model_config(path: str) -> Any:
    """The configuration of a model in a folder or in the hub's cache; None if it is not there."""
    from transformers import AutoConfig

    place = str(Path(path).expanduser())
    try:
        return AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):  # also of a model with code of its own
        return None


def shape_of(path: str) -> ModelShape | None:
    """The shape of a language model in a folder or in the hub's cache; None if it is not there."""
    import torch
    from transformers import AutoModelForCausalLM

    if (config := model_config(path)) is None:
        return None
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError:  # of pictures too
        return None
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
    )


def longest_row(config: Any) -> int:
    return int(config.data.max_prompt_length + config.data.max_response_length)


def needed_disk_gb(shape: ModelShape) -> float:
    """The environment, the weights, and two checkpoints: parameters and Adam's state in float32."""
    return 15 + (2 + 2 * 12) * shape.parameters / 1e9


def larger_than(fits: Mapping[str, Any], config: Any) -> str:
    """Return those of these overrides that ask for less memory of a GPU than the configuration."""
    from omegaconf import OmegaConf

    given = {key: OmegaConf.select(config, key) for key in fits}
    if not config.actor_rollout_ref.actor.use_dynamic_bsz:
        rows = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu or 1
        given[TOKENS] = rows * longest_row(config)
    # what is away from the GPU is True, and the others are limits
    return " ".join(
        f"{key}={value}"
        for key, value in fits.items()
        if (value and not given[key] if isinstance(value, bool) else given[key] > value)
    )


def doubts(config: Any, shape: ModelShape, gpu_gb: float) -> list[str]:
    """A sentence where the model may not fit on GPUs of `gpu_gb`; no GPU has confirmed it."""
    if config.actor_rollout_ref.model.lora_rank > 0:  # its own states are small
        return []
    count = config.trainer.n_gpus_per_node * config.trainer.nnodes
    fits = fitting(shape, longest_row(config), count, gpu_gb)
    remedy = larger_than(fits, config) if fits else "more GPUs, or a smaller model"
    size = f"{shape.parameters / 1e9:.2f} B parameters on {count} x {gpu_gb:.0f} GB"
    said = f"{size} may not fit (computed, not measured). What fits: {remedy}"
    return [said] if remedy else []


def small_shared_memory(config: Any) -> list[str]:
    """A sentence if /dev/shm is too small."""
    from omegaconf import OmegaConf

    rollout, shared = config.actor_rollout_ref.rollout, Path("/dev/shm")
    if OmegaConf.select(rollout, "name") != "vllm" or not shared.is_dir():
        return []
    free_gb = shutil.disk_usage(shared).free / 1e9
    servers = config.trainer.n_gpus_per_node / rollout.tensor_model_parallel_size
    if free_gb >= SHARED_MEMORY_GB * servers:
        return []
    return [
        f"{shared}: {free_gb:.2f} GB free; expected at least {SHARED_MEMORY_GB * servers:.1f} for "
        "vLLM. In a container: --shm-size=16g, or --ipc=host"
    ]


def check_gpus(config: Any) -> list[str]:
    """What is said of the GPUs of a run on `trainer.device=cuda`: a remark, and then doubts.

    Raises:
        ValueError: there are too few, or the machine lacks what they need.
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
    is_fsdp = str(config.actor_rollout_ref.actor.strategy).startswith("fsdp")
    shape = shape_of(str(config.actor_rollout_ref.model.path)) if is_fsdp else None
    sizes = [torch.cuda.get_device_properties(i) for i in range(wanted)]
    known = [
        Gpu(str(i), "", size.name, size.total_memory >> 20, "", (size.major, size.minor))
        for i, size in enumerate(sizes)
    ]
    there = first_that_exists(Path(str(config.trainer.default_local_dir)))
    disk_gb = needed_disk_gb(shape) if shape else LEAST_DISK_GB
    problems = missing(known, there, disk_gb) + small_shared_memory(config)
    if problems and not os.environ.get(GO_ON):
        raise ValueError(f"{'; '.join(problems)}. {GO_ON}=1 goes on all the same")
    gpu_gb = min(size.total_memory for size in sizes) / 1e9
    of_model = doubts(config, shape, gpu_gb) if shape else []
    return [f"{found} GPUs of {gpu_gb:.0f} GB", *of_model, *problems]


def first_that_exists(path: Path) -> Path:
    return next(place for place in (path.resolve(), *path.resolve().parents) if place.exists())


def main(arguments: Sequence[str]) -> int:
    """Print the overrides; return 1 if something is missing."""
    task, folder, wanted, *given = [*arguments, *(".", "")[len(arguments) - 1 :]]
    overrides: list[str] = []
    problems: list[str] = []
    try:
        gpus = find_gpus(os.environ)
        print(f"found {len(gpus)} GPUs{f' ({_names(gpus)})' if gpus else ''}", file=sys.stderr)
        problems = missing(gpus, Path(folder)) if gpus else []
        used = int(wanted or used_of(gpus))
        overrides = overrides_for(task, gpus, used, *given)
        if used < len(gpus):
            why = "" if wanted else ": the recipes' batches divide by 1, 2, 4 and 8"
            print(f"{used} of them are used{why}", file=sys.stderr)
    except ValueError as error:
        problems.append(str(error))
    for problem in problems:
        print(f"this machine: {problem}", file=sys.stderr)
    if problems and not os.environ.get(GO_ON):
        return 1
    print(" ".join(overrides))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
