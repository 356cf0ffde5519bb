"""Which GPUs each recipe needs: computed, not measured.

python -m workshop.benchmarks.gpu_tables

prints the table of recipes/README.md, from the recipes as they are composed, the keys that `run.sh`
chooses, and the memory that `verl-gdpo check` computes.
"""

import functools
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.tools import RECIPES
from verl_gdpo.tools.check.gpus import (
    DEEPSEEK_1_5B,
    DEEPSEEK_7B,
    OFFLOAD_POLICY,
    QWEN_1_5B,
    ModelShape,
    fitting,
    host_gb,
    longest_row,
    needed_gb,
)
from verl_gdpo.tools.compose import compose_config

MIB = {24: 23_034, 40: 40_960, 48: 46_068, 80: 81_920, 141: 143_771}  # as nvidia-smi says
MACHINES = ((1, 80), (8, 24), (8, 40), (8, 48), (8, 80), (8, 141))  # GPUs and their GB
QWEN_4B = ModelShape(4_022_468_096, 36, 2560, 9728, 151_936, tied=True)
WORKS = (
    ("tool_rl", "Qwen/Qwen2.5-1.5B-Instruct", QWEN_1_5B),
    ("gsm8k", "Qwen/Qwen2.5-1.5B-Instruct", QWEN_1_5B),
    ("math_length", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", DEEPSEEK_1_5B),
    ("math_length", "Qwen/Qwen3-4B-Instruct-2507", QWEN_4B),
    ("math_length", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", DEEPSEEK_7B),
    ("coding", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", DEEPSEEK_7B),
)


def memory_table() -> str:
    """As Markdown: GB of one GPU in the update and in the rollout, and of the host."""
    names = [f"{count} x {size} GB" for count, size in MACHINES]
    lines = [f"| task | model | {' | '.join(names)} |", "|---|---" + "|---" * len(names) + "|"]
    for task, model, shape in WORKS:
        cells = [_memory(task, shape, *machine) for machine in MACHINES]
        lines.append(f"| {' | '.join([task, model.partition('/')[2], *cells])} |")
    return "\n".join(lines)


def _memory(task: str, shape: ModelShape, count: int, size: int) -> str:
    config, gpu_gb = _config(task, count).copy(), MIB[size] * 2**20 / 1e9
    keys = fitting(shape, longest_row(config), count, gpu_gb)
    if keys is None:
        return "too small"
    for key, value in keys.items():
        OmegaConf.update(config, key, value)
    needed = [*needed_gb(shape, config, gpu_gb).values(), host_gb(shape, config)]
    text = " / ".join(f"{gb:.0f}" for gb in needed)
    return f"{text}, Adam on the CPU" if keys[OFFLOAD_POLICY] else text


@functools.cache
def _config(task: str, count: int) -> Any:
    return compose_config(RECIPES, "train", [f"task={task}", f"trainer.n_gpus_per_node={count}"])


if __name__ == "__main__":
    print(memory_table())
