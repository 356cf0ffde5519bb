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

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TOKENS = f"{ACTOR}.ppo_max_token_len_per_gpu"
OFFLOADS = tuple(f"{ACTOR}.fsdp_config.{what}_offload" for what in ("param", "optimizer"))
OFFLOAD_POLICY = f"{ACTOR}.fsdp_config.offload_policy"  # FSDP2's own: Adam runs on the CPU
VLLM_SHARE = f"{ROLLOUT}.gpu_memory_utilization"


class Keys(NamedTuple):
    """Keys of memory; the defaults fit most machines."""

    tokens: int = 24_576  # of a micro-batch
    vllm_share: float = 0.5  # of a GPU
    adam_on_cpu: bool = False

    def overrides(self) -> dict[str, Any]:
        stay = dict.fromkeys(OFFLOADS, False)
        sizes = {TOKENS: self.tokens, VLLM_SHARE: self.vllm_share}
        return {**sizes, **stay, OFFLOAD_POLICY: self.adam_on_cpu}


ON_CPU, SMALL = Keys(adam_on_cpu=True), Keys(15_360, 0.79, adam_on_cpu=True)
CARDS_GB = (24, 40, 48, 80, 141)
# {billions of parameters: {GPUs: {GB of each: keys}}}, where they are not the default ones;
# computed once for the recipes' models and longest rows, and confirmed by no GPU
KEYS: Mapping[float, Mapping[int, Mapping[int, Keys]]] = {
    1.5: {
        1: {24: ON_CPU, 40: Keys(vllm_share=0.43), 48: Keys(vllm_share=0.49)},
        2: {24: Keys(16_384, 0.43)},
    },
    1.8: {
        1: {24: ON_CPU, 40: Keys(15_360, 0.37), 48: Keys(vllm_share=0.43)},
        2: {24: ON_CPU},
    },
    7.6: {
        1: {24: SMALL, 40: ON_CPU, 48: ON_CPU, 80: ON_CPU, 141: Keys(9216, 0.31)},
        2: {24: SMALL, 40: ON_CPU, 48: ON_CPU, 80: ON_CPU},
        4: {24: SMALL, 40: ON_CPU, 48: ON_CPU},
        8: {24: SMALL, 40: Keys(20_480)},
    },
}
MODEL_OF_TASK = {"math_length": 1.8, "coding": 7.6}
MODEL_OF_TASK |= dict.fromkeys(("tool_rl", "gsm8k", "constraints"), 1.5)


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
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    query = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        if _has_device():
            raise ValueError(f"a GPU is in /dev, but nvidia-smi does not work: {error}") from None
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    gpus = [_gpu(*row) for row in rows if len(row) == 4]
    return gpus if visible is None else _chosen(gpus, visible)


def _has_device() -> bool:
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _gpu(index: str, uuid: str, name: str, memory: str) -> Gpu:
    if not memory.isdecimal():  # as "[N/A]", where memory is shared with the CPU
        raise ValueError(f"GPU {name}: nvidia-smi says memory {memory}")
    return Gpu(index, uuid, name, int(memory))


def _chosen(gpus: Sequence[Gpu], visible: str) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES=`visible` names, in its order."""
    chosen = []
    for text in (text.strip() for text in visible.split(",")):
        named = [g for g in gpus if text and (text == g.index or g.uuid.startswith(text))]
        if not named:  # CUDA does not see those behind it either
            break
        chosen.append(named[0])
    if not chosen and gpus:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible}, but the GPUs here are {_names(gpus)}")
    return chosen


def _names(gpus: Sequence[Gpu]) -> str:
    return ", ".join(sorted({gpu.name for gpu in gpus}))


def keys_for(billions: float, count: int, memory_mib: int) -> Keys:
    """The keys for a model of the table on `count` GPUs, each as the next smaller card."""
    # a driver and torch take up to a tenth of what a card is sold with
    fits = [card for card in CARDS_GB if memory_mib >= 0.9 * 1024 * card]
    return KEYS[billions].get(used_of(count), {}).get(max(fits, default=CARDS_GB[0]), Keys())


def used_of(count: int) -> int:
    """How many of `count` GPUs divide each batch of the recipes."""
    return max((n for n in COUNTS if n <= count), default=0)


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
    number = [] if count in (1, 8) else [f"trainer.n_gpus_per_node={count}"]
    hardware = [f"hardware={'1gpu' if count == 1 else '8gpu'}", *number]
    if task in MODEL_OF_TASK:
        keys = keys_for(MODEL_OF_TASK[task], count, min(gpu.memory_mib for gpu in gpus))
        return [*hardware, *(f"{key}={value}" for key, value in keys.overrides().items())]
    set_keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    if "--resume" not in set_keys and not {TOKENS, VLLM_SHARE} <= set_keys:
        raise ValueError(
            f"the size of the model of task={task} is not known here. Give {TOKENS}=N (tokens of a "
            f"micro-batch: at least the longest row) and {VLLM_SHARE}=X (vLLM's share of a GPU, "
            f"such as 0.5). A large model may need {' and '.join(OFFLOADS)} too"
        )
    return hardware


def main(arguments: Sequence[str]) -> int:
    """Print the overrides; return 1 if they are not known."""
    task, wanted, *overrides = arguments
    try:
        gpus = find_gpus(os.environ)
        print(f"found {len(gpus)} GPUs{f' ({_names(gpus)})' if gpus else ''}", file=sys.stderr)
        used = int(wanted or used_of(len(gpus)))
        chosen = overrides_for(task, gpus, used, *overrides)
    except ValueError as error:
        print(f"this machine: {error}", file=sys.stderr)
        return 1
    if used < len(gpus):
        why = "" if wanted else ": the recipes' batches divide by 1, 2, 4 and 8"
        print(f"{used} of them are used{why}", file=sys.stderr)
    if task in MODEL_OF_TASK and gpus:
        print("the keys of memory were computed; an override takes their place", file=sys.stderr)
    print(" ".join(chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
