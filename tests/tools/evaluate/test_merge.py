"""Of one rank; `tests/slow/merge.py` merges what verl's engine saves from two."""

import os
from contextlib import nullcontext
from pickle import UnpicklingError

import pytest
import torch
from shards import save_shards
from tiny_chat_model import make_chat_model
from transformers import AutoModelForCausalLM

from verl_gdpo.tools.evaluate import merge as merging
from verl_gdpo.tools.evaluate.merge import merge
from verl_gdpo.tools.evaluate.policy import find_policy

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
    patch = merging.patch.object

    def all_but_the_cast(owner, name, replacement):
        return nullcontext() if name == "bfloat16" else patch(owner, name, replacement)

    monkeypatch.setattr(merging.patch, "object", all_but_the_cast)
    with pytest.raises(ValueError, match=r"is torch\.bfloat16, and torch\.float32 in the check"):
        merge(tmp_path / "actor", tmp_path / "merged")


class Program:
    """What a shard can hold instead of a tensor: it makes a folder where it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def hostile(tmp_path):
    """(a checkpoint whose shard has a program beside its weights, what this would make)"""
    weights = save_shards(make_chat_model(tmp_path / "model"), tmp_path / "actor")
    mark = tmp_path / "it ran"
    weights["program"] = Program(mark)
    torch.save(weights, tmp_path / "actor" / "model_world_size_1_rank_0.pt")
    return tmp_path / "actor", mark


@pytest.mark.slow
def test_a_shard_that_is_a_program_runs_nothing(hostile, tmp_path, capsys, monkeypatch):
    actor, mark = hostile
    monkeypatch.setattr("sys.argv", ["merge", str(actor), str(tmp_path / "merged")])
    assert merging.main() == 1
    shard = actor / "model_world_size_1_rank_0.pt"
    said = f"{shard}: it is a program, and not only tensors: to load it runs posix.mkdir. "
    assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"it is a program.*--trust loads it all the same"):
        find_policy(actor)
    assert not mark.exists()
    # what verl's merger loads is no program either, if the look before had missed it
    monkeypatch.setattr(merging, "_dtype_of", lambda shard, trust: torch.float32)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        merge(actor, tmp_path / "merged")
    assert not mark.exists()
    # the second time, verl's merger gets to it
    with pytest.raises(FileExistsError):
        merge(actor, tmp_path / "merged", trust=True)
    assert mark.exists()


def test_what_is_not_there_is_named(tmp_path):
    save_shards(make_chat_model(tmp_path / "model"), tmp_path / "actor")
    shard = tmp_path / "actor" / "model_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"actor/model_world_size_1_rank_0\.pt is cut or damaged"):
        merge(tmp_path / "actor", tmp_path / "merged")
    shard.unlink()
    with pytest.raises(ValueError, match=r"actor has no file model_world_size_N_rank_K\.pt"):
        merge(tmp_path / "actor", tmp_path / "merged")
