"""How much memory of a GPU a run is expected to need: computed, not measured.

Under FSDP2 every GPU keeps its share of the parameters, the gradients and Adam's two moments in
float32. The rest of a training pass is what gradient checkpointing keeps, one layer computed again,
the output layer as a whole, and a chunk of logits. While vLLM generates, it takes
`gpu_memory_utilization` of the GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHUNK_TOKENS = 512  # of verl's fused kernels
CHUNK_COPIES = 5  # of a chunk of logits, in float32: logits, probabilities, one-hot, gradients
CONTEXT_GB = 3.0  # CUDA, NCCL, what vLLM keeps while it sleeps, fragmentation
LEAST_CACHE_GB = 4.0  # of vLLM beside its weights
# of the output layer: weights and gradients in bfloat16, and gradients once more in float32
WHOLE_LAYER_BYTES = 2 + 2 + 4


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
