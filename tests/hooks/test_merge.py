"""Of one rank; `tests/slow/merge.py` merges what verl's engine saves from two."""

import pytest
import torch
from shards import save_shards
from tiny_chat_model import make_chat_model
from transformers import AutoModelForCausalLM

from verl_gdpo.hooks import merge as merging
from verl_gdpo.hooks.merge import merge

IDS = torch.arange(40)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_model_has_the_logits_of_the_trainer(tmp_path, dtype):
    model = make_chat_model(tmp_path / "model", dtype=dtype)
    weights = save_shards(model, tmp_path / "actor", noise=2**-7 / 3)
    merge(tmp_path / "actor", tmp_path / "merged")
    trained = AutoModelForCausalLM.from_pretrained(model)
    trained.load_state_dict(weights)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")  # its config names the type
    assert merged.dtype == dtype
    assert torch.equal(merged(IDS).logits, trained(IDS).logits)
    before = AutoModelForCausalLM.from_pretrained(model)
    assert not torch.equal(merged(IDS).logits, before(IDS).logits)


def test_a_cast_that_is_not_known_is_seen(tmp_path, monkeypatch):
    save_shards(make_chat_model(tmp_path / "model"), tmp_path / "actor")
    monkeypatch.setattr(merging, "patch", type("No", (), {"object": lambda *_: Untouched()}))
    with pytest.raises(ValueError, match=r"is torch\.bfloat16, and torch\.float32 in the check"):
        merge(tmp_path / "actor", tmp_path / "merged")


class Untouched:
    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass
