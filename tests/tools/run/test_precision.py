"""Which number format `auto` stands for in a training without a GPU."""

import pytest
import torch
from composed_recipes import composed
from omegaconf import OmegaConf

from verl_gdpo.tools.run import precision
from verl_gdpo.tools.run.precision import ROLLOUT_KEY, TRAINED_KEYS, choose, has_fast_bfloat16

CONSTRAINTS = ("task=constraints", "hardware=cpu")


@pytest.fixture
def processor(monkeypatch):
    """Lets it have a fast bfloat16, or not."""

    def set_to(is_fast):
        monkeypatch.setattr(precision, "has_fast_bfloat16", lambda: is_fast)

    return set_to


@pytest.mark.parametrize(
    ("is_fast", "trained", "rolled_out"),
    [(True, "bf16", "bfloat16"), (False, "fp32", "float32")],
)
def test_the_processor_decides_what_auto_is(processor, is_fast, trained, rolled_out):
    processor(is_fast)
    config = composed(*CONSTRAINTS)
    assert f"numbers: {rolled_out}, since this processor" in choose(config)
    assert [OmegaConf.select(config, key) for key in TRAINED_KEYS] == [trained, trained]
    assert OmegaConf.select(config, ROLLOUT_KEY) == rolled_out
    assert choose(config) is None  # it is said once


def test_what_a_user_names_stays(processor):
    processor(False)
    config = composed(*CONSTRAINTS, f"{TRAINED_KEYS[0]}=bf16", f"{ROLLOUT_KEY}=bfloat16")
    choose(config)
    assert OmegaConf.select(config, TRAINED_KEYS[0]) == "bf16"
    assert OmegaConf.select(config, ROLLOUT_KEY) == "bfloat16"


def test_a_rollout_on_a_gpu_keeps_its_own_auto(processor):
    processor(False)
    config = composed("hardware=1gpu", f"{ROLLOUT_KEY}=auto")
    assert choose(config) is None
    assert OmegaConf.select(config, ROLLOUT_KEY) == "auto"


def test_torch_is_asked_for_the_processor(monkeypatch):
    """The name is not public: without it, float32 is chosen, and nothing fails."""
    assert has_fast_bfloat16() == bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    monkeypatch.delattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported")
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert has_fast_bfloat16() is False
