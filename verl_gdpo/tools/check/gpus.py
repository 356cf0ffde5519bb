"""The NVIDIA GPUs of this machine, and what a training on them needs of the machine besides.

    python3 verl_gdpo/tools/check/gpus.py [FOLDER]

prints the overrides of the recipes that fit, and ends with 1 and a line for each thing that is
missing. `run_tool_rl.sh` runs it before it installs or downloads anything, so it uses the standard
library alone. FOLDER is where the environment, the model and the checkpoints will lie.
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

QUERY = ("--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits")
# recipes/gpu_memory/NAME.yaml: the least that such a GPU has, in MiB (an L40S "of 48 GB": 46,068)
CLASSES = {"141gb": 138_000, "80gb": 79_000, "48gb": 44_000, "24gb": 22_000}
LEAST_DRIVER = 580  # of CUDA 13, for which vllm 0.24 and torch 2.11 are built
# of the recipes with the smallest model: environment 15, model 3, two checkpoints of 1.5 B 37
LEAST_DISK_GB = 60.0


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
