"""The GPUs of this machine, and the keys of verl for them.

    python3 verl_gdpo/tools/run/gpus.py TASK COUNT [KEY=VALUE ...]

prints the overrides for them, and ends with 1 where it cannot tell. `run.sh` runs it before it
installs or downloads anything, so it imports the standard library alone. COUNT is how many GPUs are
wanted, or "". KEY=VALUE are the command's own overrides: for a task that is not in `MODEL_OF_TASK`,
they have to have the keys of memory, or to say `--resume`, as the run that goes on has them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FIELDS = "index,uuid,name,memory.total"
COUNTS = (1, 2, 4, 8)  # they divide each batch of the recipes

# Values of CUDA_VISIBLE_DEVICES that leave no GPU; Slurm gives the last to a job without GPUs.
NONE_VISIBLE = ("", "-1", "NoDevFiles")

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
OFFLOADS = (
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
)
OFFLOAD_POLICY = f"{ACTOR}.fsdp_config.offload_policy"  # FSDP2's own: Adam runs on the CPU
VLLM_SHARE = f"{ROLLOUT}.gpu_memory_utilization"


class Keys(NamedTuple):
    """Keys of memory; the defaults fit most machines."""

    tokens: int = 24_576  # of a micro-batch
    vllm_share: float = 0.5  # of a GPU
    adam_on_cpu: bool = False

    def overrides(self) -> dict[str, Any]:
        values: dict[str, Any] = {TOKENS: self.tokens, VLLM_SHARE: self.vllm_share}
        for offload in OFFLOADS:
            values[offload] = False
        values[OFFLOAD_POLICY] = self.adam_on_cpu
        return values


ON_CPU = Keys(adam_on_cpu=True)
SMALL = Keys(tokens=15_360, vllm_share=0.79, adam_on_cpu=True)
CARDS_GB = (24, 40, 48, 80, 141)
# {billions of parameters: {GPUs: {GB of each: keys}}}, where they are not the default ones;
# computed once for the recipes' models and longest rows, and confirmed by no GPU
KEYS: Mapping[float, Mapping[int, Mapping[int, Keys]]] = {
    1.5: {
        1: {24: ON_CPU, 40: Keys(vllm_share=0.43), 48: Keys(vllm_share=0.49)},
        2: {24: Keys(tokens=16_384, vllm_share=0.43)},
    },
    1.8: {
        1: {24: ON_CPU, 40: Keys(tokens=15_360, vllm_share=0.37), 48: Keys(vllm_share=0.43)},
        2: {24: ON_CPU},
    },
    7.6: {
        1: {
            24: SMALL,
            40: ON_CPU,
            48: ON_CPU,
            80: ON_CPU,
            141: Keys(tokens=9216, vllm_share=0.31),
        },
        2: {24: SMALL, 40: ON_CPU, 48: ON_CPU, 80: ON_CPU},
        4: {24: SMALL, 40: ON_CPU, 48: ON_CPU},
        8: {24: SMALL, 40: Keys(tokens=20_480)},
    },
}
# Billions of parameters.
MODEL_OF_TASK = {
    "math_length": 1.8,
    "coding": 7.6,
    "tool_rl": 1.5,
    "gsm8k": 1.5,
    "constraints": 1.5,
}


@dataclass(frozen=True)
class Gpu:
    index: str
    uuid: str
    name: str
    memory_mib: int


def find_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves.

    Raises:
        ValueError: there is a GPU, but it cannot be used or nothing is known of it.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in NONE_VISIBLE:
        return []
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        if _has_device():
            raise ValueError(f"a GPU is in /dev, but nvidia-smi does not work: {error}") from None
        return []
    gpus = _listed(done.stdout)
    if visible is None:
        return gpus
    return _chosen(gpus, visible)


def _listed(output: str) -> list[Gpu]:
    """The GPUs in what nvidia-smi prints: a line for each, with `FIELDS`."""
    gpus = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4:
            index, uuid, name, memory = cells
            gpus.append(_gpu(index, uuid, name, memory))
    return gpus


def _has_device() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _gpu(index: str, uuid: str, name: str, memory: str) -> Gpu:
    if not memory.isdecimal():  # as "[N/A]", where memory is shared with the CPU
        raise ValueError(f"GPU {name}: nvidia-smi says memory {memory}")
    return Gpu(index, uuid, name, int(memory))


def _chosen(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES=`visible` names, in its order."""
    chosen = []
    for text in visible.split(","):
        named = _named(gpus, text.strip())
        if not named:  # CUDA does not see those behind it either
            break
        chosen.append(named[0])
    if not chosen and gpus:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}, but the GPUs here are {_names(gpus)}")
    return chosen


def _named(gpus: Sequence[Gpu], text: str) -> list[Gpu]:
    """Those that have this index, or whose UUID begins like this; none for an empty text."""
    if not text:
        return []
    return [gpu for gpu in gpus if gpu.index == text or gpu.uuid.startswith(text)]


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(sorted({gpu.name for gpu in gpus}))


def keys_for(billions: float, count: int, memory_mib: int) -> Keys:
    """The keys for a model of the table on `count` GPUs, each as the next smaller card."""
    # A driver and torch take up to a tenth of what a card is sold with.
    not_larger = [card for card in CARDS_GB if memory_mib >= 0.9 * 1024 * card]
    card = max(not_larger, default=CARDS_GB[0])
    keys_of_card = KEYS[billions].get(used_of(count), {})
    return keys_of_card.get(card, Keys())


def used_of(count: int) -> int:
    """How many of `count` GPUs divide each batch of the recipes."""
    return max((divisor for divisor in COUNTS if divisor <= count), default=0)


def overrides_for(task: str, gpus: Sequence[Gpu], count: int, *overrides: str) -> list[str]:
    """The overrides for `count` of these GPUs and the recipe's model.

    Args:
        overrides: those of the command.

    Raises:
        ValueError: the GPUs are too few, or nothing is known of the task's model.
    """
    if not gpus:
        return ["hardware=cpu"]
    if count > len(gpus):
        raise ValueError(f"{count} GPUs are wanted, and {len(gpus)} are here")
    hardware = _hardware(count)
    if task in MODEL_OF_TASK:
        smallest_mib = min(gpu.memory_mib for gpu in gpus)
        keys = keys_for(MODEL_OF_TASK[task], count, smallest_mib)
        return hardware + [f"{key}={value}" for key, value in keys.overrides().items()]
    set_keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    if "--resume" not in set_keys and not {TOKENS, VLLM_SHARE} <= set_keys:
        raise ValueError(
            f"the size of the model of task={task} is not known here. Give {TOKENS}=N (tokens of a "
            f"micro-batch: at least the longest row) and {VLLM_SHARE}=X (vLLM's share of a GPU, "
            f"such as 0.5). A large model may need {' and '.join(OFFLOADS)} too"
        )
    return hardware


def _count(wanted: str) -> int:
    """The number of GPUs that somebody wants; ValueError if it is none."""
    if not wanted.isdecimal() or int(wanted) == 0:
        raise ValueError(f"trainer.n_gpus_per_node={wanted}: expected a number, such as 1, 2, 4, 8")
    return int(wanted)


def _hardware(count: int) -> list[str]:
    """The recipe for so many GPUs, and their number where the recipe has another one."""
    if count == 1:
        return ["hardware=1gpu"]
    if count == 8:
        return ["hardware=8gpu"]
    return ["hardware=8gpu", f"trainer.n_gpus_per_node={count}"]


def main(arguments: Sequence[str]) -> int:
    """Print the overrides; return 1 if they are not known."""
    task, wanted, *overrides = arguments
    try:
        gpus = find_gpus(os.environ)
        found = f"found {len(gpus)} GPUs"
        if gpus:
            found += f" ({_names(gpus)})"
        print(found, file=sys.stderr)
        used = used_of(len(gpus))
        if wanted:
            used = _count(wanted)
        chosen = overrides_for(task, gpus, used, *overrides)
    except ValueError as error:
        print(f"this machine: {error}", file=sys.stderr)
        return 1
    if used < len(gpus):
        why = ""
        if not wanted:
            why = ": the recipes' batches divide by 1, 2, 4 and 8"
        print(f"{used} of them are used{why}", file=sys.stderr)
    if task in MODEL_OF_TASK and gpus:
        print("the keys of memory were computed; an override takes their place", file=sys.stderr)
    print(" ".join(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
