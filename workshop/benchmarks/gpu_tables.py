"""Which GPUs each recipe needs: computed, not measured.

python -m workshop.benchmarks.gpu_tables

prints the table of recipes/README.md, from the recipes as they are composed and the memory that
`verl-gdpo check` computes.
"""

import functools
from typing import Any

from verl_gdpo.tools import RECIPES
from verl_gdpo.tools.check.gpus import CLASSES, memory_problems, needed_gb
from verl_gdpo.tools.compose import compose_config
from workshop.benchmarks.step_model import (
    DEEPSEEK_1_5B,
    DEEPSEEK_7B,
    QWEN_1_5B,
    QWEN_4B,
    Model,
)

MACHINES = (("80gb", 1), ("24gb", 8), ("48gb", 8), ("80gb", 8), ("141gb", 8))
WORKS = (
    ("tool_rl", QWEN_1_5B),
    ("gsm8k", QWEN_1_5B),
    ("math_length", DEEPSEEK_1_5B),
    ("math_length", QWEN_4B),
    ("math_length", DEEPSEEK_7B),
    ("coding", DEEPSEEK_7B),
)


def memory_table() -> str:
    """As Markdown: GB of one GPU in the update and in the rollout, or that `check` refuses."""
    lines = ["| task | model |" + "".join(f" {n} x {name[:-2]} GB |" for name, n in MACHINES)]
    lines.append("|---|---" + "|---" * len(MACHINES) + "|")
    for task, model in WORKS:
        cells = [_memory(task, model, name, count) for name, count in MACHINES]
        lines.append(f"| {' | '.join([task, model.name.partition('/')[2], *cells])} |")
    return "\n".join(lines)


def _memory(task: str, model: Model, name: str, count: int) -> str:
    gpu_gb = CLASSES[name] * 2**20 / 1e9  # the least that a GPU of this class has
    needed = needed_gb(model.shape, _config(task, name, count), gpu_gb)
    text = " / ".join(f"{gb:.0f}" for gb in needed.values())
    return f"refused: {text}" if memory_problems(needed, gpu_gb) else text


@functools.cache
def _config(task: str, name: str, count: int) -> Any:
    overrides = [f"task={task}", f"gpu_memory={name}", f"trainer.n_gpus_per_node={count}"]
    return compose_config(RECIPES, "train", overrides)


if __name__ == "__main__":
    print(memory_table())
