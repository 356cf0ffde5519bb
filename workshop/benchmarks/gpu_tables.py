"""Which GPUs each recipe needs: computed, not measured.

python -m workshop.benchmarks.gpu_tables

prints the table of recipes/README.md, from the recipes as they are composed, the keys that `run.sh`
chooses, and a formula of the memory that a run needs.
"""

import functools
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.tools import RECIPES
from verl_gdpo.tools.check.gpus import (
    CONTEXT_GB,
    DEEPSEEK_1_5B,
    DEEPSEEK_7B,
    LEAST_CACHE_GB,
    OFFLOAD_POLICY,
    QWEN_1_5B,
    ModelShape,
    fitting,
    longest_row,
    token_gb,
    update_gb,
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
    """As Markdown: GB of one GPU in the update and in the rollout."""
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
    text = " / ".join(f"{gb:.0f}" for gb in needed_gb(shape, config, gpu_gb).values())
    return f"{text}, Adam on the CPU" if keys[OFFLOAD_POLICY] else text


def needed_gb(shape: ModelShape, config: Any, gpu_gb: float) -> dict[str, float]:
    """{phase: GB of one GPU} for verl's configuration, on GPUs of `gpu_gb`."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
    if 0 < actor.fsdp_config.fsdp_size < gpus:  # the shards; other GPUs have copies of them
        gpus = actor.fsdp_config.fsdp_size
    tokens = longest_row(config) * (actor.ppo_micro_batch_size_per_gpu or 1)
    if actor.use_dynamic_bsz:
        tokens = actor.ppo_max_token_len_per_gpu
    is_lora = config.actor_rollout_ref.model.lora_rank > 0  # whose own states are small
    bytes_of = {"param": 4, "optimizer": 0 if is_lora else 8, "gradient": 0 if is_lora else 4}
    if actor.fsdp_config.offload_policy:
        bytes_of = dict.fromkeys(bytes_of, 0)
    update = update_gb(shape, gpus, state_bytes=sum(bytes_of.values())) + tokens * token_gb(shape)
    if not config.actor_rollout_ref.model.use_fused_kernels:
        # all logits, in bfloat16, with softmax and gradient
        update += tokens * shape.vocabulary * 2 * 3 / 1e9
    waiting = 0 if actor.fsdp_config.param_offload else bytes_of["param"]
    waiting += 0 if actor.fsdp_config.optimizer_offload else bytes_of["optimizer"]
    weights_gb = 2 * shape.parameters / rollout.tensor_model_parallel_size / 1e9
    for_vllm = max(rollout.gpu_memory_utilization * gpu_gb, weights_gb + LEAST_CACHE_GB)
    return {
        "update": update,
        "rollout": for_vllm + waiting * shape.parameters / gpus / 1e9 + CONTEXT_GB,
    }


@functools.cache
def _config(task: str, count: int) -> Any:
    return compose_config(RECIPES, "train", [f"task={task}", f"trainer.n_gpus_per_node={count}"])


if __name__ == "__main__":
    print(memory_table())
