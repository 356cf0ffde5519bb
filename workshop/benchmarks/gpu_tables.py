"""Which GPUs each recipe needs, and what a step should take there: computed, not measured.

python -m workshop.benchmarks.gpu_tables

prints the two tables of recipes/README.md, from the recipes as they are composed, the memory that
`verl-gdpo check` computes, and `workshop.benchmarks.step_model`.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_gdpo.tools import RECIPES
from verl_gdpo.tools.check.gpus import CLASSES, memory_problems, needed_gb
from verl_gdpo.tools.compose import compose_config
from workshop.benchmarks.step_model import GPUS, WORKS, Work, seconds

MACHINES = (("80gb", 1), ("24gb", 8), ("48gb", 8), ("80gb", 8), ("141gb", 8))
ATTENTIONS = ("sdpa", "flash_attn")


def memory_table() -> str:
    """As Markdown: GB of one GPU in the update and in the rollout, or that `check` refuses."""
    names = [f"{count} x {name.removesuffix('gb')} GB" for name, count in MACHINES]
    rows = [
        [*_names(work), *(_memory(work, name, count) for name, count in MACHINES)] for work in WORKS
    ]
    return _markdown(["task", "model", *names], rows)


def seconds_table() -> str:
    """As Markdown: seconds of a step on GPUs of 80 GB, where the recipe fits."""
    machines = [(gpu, count) for gpu in GPUS if gpu.memory_gb == 80 for count in (1, 8)]
    rows = []
    for work in WORKS:
        for attention in ATTENTIONS:
            computed = work if attention == "sdpa" else replace(work, padding=1.0)
            cells = [
                f"{sum(seconds(computed, gpu, count).values()):,.0f} s"
                if not _problems(work, "80gb", count)
                else "does not fit"
                for gpu, count in machines
            ]
            tokens = f"{work.prompt_tokens:.0f} + {work.response_tokens:.0f}"
            rows.append([*_names(work), tokens, attention, *cells])
    names = [f"{count} x {gpu.name}" for gpu, count in machines]
    return _markdown(["task", "model", "mean tokens", "attention", *names], rows)


def _names(work: Work) -> tuple[str, str]:
    return work.name, work.model.name.partition("/")[2]


def _memory(work: Work, name: str, count: int) -> str:
    text = " / ".join(f"{gb:.0f}" for gb in _needed(work, name, count).values())
    return f"refused: {text}" if _problems(work, name, count) else text


def _problems(work: Work, name: str, count: int) -> list[str]:
    return memory_problems(_needed(work, name, count), _gpu_gb(name))


def _needed(work: Work, name: str, count: int) -> Mapping[str, float]:
    return needed_gb(work.model.shape, _config(work.name, name, count), _gpu_gb(name))


def _gpu_gb(name: str) -> float:
    """The least that a GPU of this class has."""
    return CLASSES[name] * 2**20 / 1e9


@functools.cache
def _config(task: str, name: str, count: int) -> Any:
    overrides = [f"task={task}", f"gpu_memory={name}", f"trainer.n_gpus_per_node={count}"]
    return compose_config(RECIPES, "train", overrides)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]])


if __name__ == "__main__":
    print(f"{memory_table()}\n\n{seconds_table()}")
