"""What is computed of a step on GPUs: the seconds in docs/status.md, and their basis."""

import re

import pytest
from pages import PAGES

from workshop.benchmarks import step_model
from workshop.benchmarks.step_model import FLOPS_SHARES, GPUS, TOOL_RL, seconds
from workshop.benchmarks.step_model import forward_flops as flops_of
from workshop.gpu_kit.made_work import QWEN_1_5B


def test_the_shape_of_the_model():
    """Parameters are counted by transformers, in a model of these sizes without values."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**QWEN_1_5B)
    sizes = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    assert sizes == (TOOL_RL.shape.layers, TOOL_RL.shape.hidden, TOOL_RL.shape.vocabulary)
    assert TOOL_RL.attention == 128 * config.num_attention_heads
    assert TOOL_RL.keys == 128 * config.num_key_value_heads
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == TOOL_RL.shape.parameters
    products = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    in_products = sum(layer.weight.numel() for layer in products)
    assert TOOL_RL.in_products == pytest.approx(in_products, rel=1e-3)  # and norms and biases


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


def test_the_seconds_of_a_step_in_the_document():
    page = " ".join(PAGES["docs/status.md"].split())
    for row in step_model.table().splitlines()[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        gpus, step = cells[0], cells[-1]
        assert re.search(rf"{step} on (8 x [\w ]+ or )?{gpus}", page)
