"""What is computed of GPUs for each recipe: the tables of recipes/README.md, and their basis."""

import pytest
from composed_recipes import RECIPES, cells_after, composed, flat
from quick_composition import compose_quickly

from verl_gdpo.tools.check.gpus import (
    DEEPSEEK_1_5B,
    DEEPSEEK_7B,
    QWEN_1_5B,
    TASKS,
    longest_row,
    needed_disk_gb,
)
from workshop.benchmarks import gpu_tables, step_model
from workshop.benchmarks.step_model import FLOPS_SHARES, GPUS, TOOL_RL, seconds
from workshop.benchmarks.step_model import forward_flops as flops_of

KIND = {
    "Qwen2.5-1.5B": (QWEN_1_5B, "Qwen2", 1536, 256),
    "DeepSeek-R1-Distill-Qwen-1.5B": (DEEPSEEK_1_5B, "Qwen2", 1536, 256),
    "DeepSeek-R1-Distill-Qwen-7B": (DEEPSEEK_7B, "Qwen2", 3584, 512),
    "Qwen3-4B": (gpu_tables.QWEN_4B, "Qwen3", 4096, 1024),
}


@pytest.mark.parametrize("name", KIND)
def test_the_shape_of_a_model(name):
    """Parameters are counted by transformers, in a model of these sizes without values."""
    import torch
    import transformers

    shape, kind, attention, keys = KIND[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=attention // 128,
        num_key_value_heads=keys // 128,
        head_dim=128,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        found = getattr(transformers, f"{kind}ForCausalLM")(config)
    assert sum(p.numel() for p in found.parameters()) == shape.parameters
    if shape is TOOL_RL.shape:
        assert (attention, keys) == (TOOL_RL.attention, TOOL_RL.keys)
        products = [m for m in found.modules() if isinstance(m, torch.nn.Linear)]
        in_products = sum(layer.weight.numel() for layer in products)
        assert TOOL_RL.in_products == pytest.approx(in_products, rel=1e-3)  # and norms and biases


@pytest.mark.slow
def test_the_work_is_that_of_the_recipes():
    config = composed("task=tool_rl", "hardware=8gpu")
    assert config.data.train_batch_size == TOOL_RL.prompts
    assert config.actor_rollout_ref.rollout.n == TOOL_RL.samples
    assert config.data.max_response_length == TOOL_RL.longest_response
    assert TOOL_RL.prompt_tokens < config.data.max_prompt_length
    for task in ("tool_rl", "gsm8k", "math_length", "coding"):
        path = composed(f"task={task}", "hardware=8gpu").actor_rollout_ref.model.path
        shapes = {(task, name): shape for task, name, shape in gpu_tables.WORKS}
        longest = longest_row(composed(f"task={task}"))
        assert TASKS[task] == (shapes[task, path], longest)


def test_what_lowers_the_memory():
    def needs(*overrides):
        return gpu_tables.needed_gb(QWEN_1_5B, composed("hardware=1gpu", *overrides), 85.9)

    fsdp, base = "actor_rollout_ref.actor.fsdp_config", needs()
    eight = needs("trainer.n_gpus_per_node=8")
    assert needs("trainer.n_gpus_per_node=8", f"{fsdp}.fsdp_size=8") == eight
    # every GPU has all shards
    assert needs("trainer.n_gpus_per_node=8", f"{fsdp}.fsdp_size=1") == base
    rollout = "actor_rollout_ref.rollout.gpu_memory_utilization"
    # 16 bytes of 1.5437 B parameters, 8 of 233 M at the ends, 10 of 46.8 M of a layer, a chunk of
    # logits, 24,576 tokens of 201 kB, and 3 GB
    by_hand = 24.70 + 1.87 + 0.47 + 1.56 + 4.94 + 3
    assert base["update"] == pytest.approx(by_hand, abs=0.05)
    assert base["rollout"] == pytest.approx(0.5 * 85.9 + 12 * 1.5437 + 3, abs=0.05)
    fewer = needs("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144")
    assert fewer["update"] == pytest.approx(by_hand - 0.75 * 4.94, abs=0.05)
    assert needs(f"{rollout}=0.3")["rollout"] == pytest.approx(base["rollout"] - 0.2 * 85.9)
    assert needs(f"{rollout}=0.01")["rollout"] > 3.1 + 4  # its weights, and some cache
    offloaded = needs(f"{fsdp}.optimizer_offload=true", f"{fsdp}.param_offload=true")
    assert offloaded["rollout"] == pytest.approx(base["rollout"] - 12 * 1.5437, abs=0.05)
    on_cpu = needs(f"{fsdp}.offload_policy=true")
    assert on_cpu["update"] == pytest.approx(by_hand - 24.70, abs=0.05)
    # gradients and moments of the adapters are small
    assert needs("actor_rollout_ref.model.lora_rank=8")["update"] == pytest.approx(
        by_hand - 0.75 * 24.70, abs=0.05
    )
    assert needs("actor_rollout_ref.model.use_fused_kernels=false")["update"] > 45
    eight = needs("trainer.n_gpus_per_node=8")["update"]
    assert eight == pytest.approx(by_hand - 24.70 * 7 / 8, abs=0.05)
    padded = ("actor_rollout_ref.actor.use_dynamic_bsz=False",)
    rows = needs(*padded, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8")
    assert rows["update"] == base["update"]  # 8 x 3,072


def test_flops_by_hand():
    """2,048 rows of 865 tokens; 2 a parameter, and 4 x 28 layers x 1,536 x half of the tokens."""
    row = 865
    by_hand = 2048 * row * (2 * 1_543_714_304 + 4 * 28 * 1536 * row / 2)
    assert flops_of(TOOL_RL) == pytest.approx(by_hand, rel=1e-9)


def test_the_papers_eight_gpus_are_in_the_range_and_its_one_is_not():
    """36 s on 8 x A100, and 90 s on one: less than its peak takes for the passes alone."""
    a100 = GPUS[0]
    best, worst = (sum(seconds(TOOL_RL, a100, 8, share).values()) for share in FLOPS_SHARES)
    assert best < 36 < worst
    at_peak = seconds(TOOL_RL, a100, 1, 1.0)
    assert at_peak["update"] + at_peak["log-probabilities, twice"] > 90


@pytest.mark.slow
def test_the_tables_in_the_document(monkeypatch):
    monkeypatch.setattr(gpu_tables, "compose_config", compose_quickly)
    text = (RECIPES / "README.md").read_text()
    assert gpu_tables.memory_table() in text
    assert step_model.table() in text


def test_the_disk_that_a_model_needs():
    """15 GB, the weights (2 bytes), and two checkpoints of 12 bytes a parameter."""
    assert needed_disk_gb(DEEPSEEK_7B) == pytest.approx(15 + 26 * 7.6156, abs=0.01)


# what verl's own examples/fapo_trainer/run_baseline_7b.sh sets of the engine, at 3867dfd: a model
# of 7 B parameters and 8,192 tokens
VERLS_LONG_EXAMPLE = {
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.use_dynamic_bsz": True,
    "actor_rollout_ref.actor.fsdp_config.param_offload": True,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": True,
    "actor_rollout_ref.ref.fsdp_config.param_offload": True,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.8,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 4,
}


@pytest.mark.parametrize("task", ["math_length", "coding"])
def test_every_difference_from_verls_long_example_has_its_reason(task):
    ours = flat(composed(f"task={task}", "hardware=8gpu"))
    differing = {
        key: (str(value), str(ours[key]))
        for key, value in VERLS_LONG_EXAMPLE.items()
        if ours[key] != value
    }
    rows = cells_after("verl's own example for a model of 7 B parameters")[2:]
    assert {key: (theirs, mine) for key, theirs, mine, _ in rows} == differing
    assert all(reason for *_, reason in rows)
