"""Packed rows attend to themselves alone, and which attention `auto` stands for."""

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from composed_recipes import composed
from omegaconf import OmegaConf
from quick_composition import compose_quickly
from stand_in import stand_in
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config
from transformers.masking_utils import create_causal_mask
from two_ranks import run_two_ranks
from verl.models.transformers import dense_common
from verl.utils import fsdp_utils

from verl_gdpo.tools.run import attention
from verl_gdpo.tools.run.attention import KEY, choose, make_known

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LENGTHS = (5, 1, 9, 1, 1, 3)


@pytest.fixture(scope="module", params=[Qwen2Config, Qwen3Config])
def model(request):
    make_known()
    torch.manual_seed(0)
    config = request.param(**SIZES, **HEADS)
    return AutoModelForCausalLM.from_config(config, attn_implementation="packed_sdpa").eval()


@pytest.fixture
def rows():
    return [torch.randint(0, 64, (length,)) for length in LENGTHS]


def alone(model, rows):
    model.set_attn_implementation("eager")
    logits = [model(row[None], use_cache=False).logits[0] for row in rows]
    model.set_attn_implementation("packed_sdpa")
    return logits


def packed(model, rows):
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]


@torch.no_grad()
def test_a_row_sees_itself_alone(model, rows):
    got, expected = packed(model, rows), torch.cat(alone(model, rows))
    assert (got - expected).abs().max() < 1e-6


@torch.no_grad()
def test_padded_rows_and_a_cache_have_their_mask(model, rows):
    batch = torch.zeros(2, 9, dtype=torch.long)
    batch[0, :5], batch[1] = rows[0], rows[2]
    given = (torch.arange(9) < torch.tensor([[5], [9]])).long()
    logits = model(batch, attention_mask=given, use_cache=False).logits
    first, second = alone(model, [rows[0], rows[2]])
    assert (logits[0, :5] - first).abs().max() < 1e-6
    assert (logits[1] - second).abs().max() < 1e-6
    whole = model(rows[2][None], use_cache=True)
    begun = model(rows[2][None, :4], use_cache=True)
    rest = model(rows[2][None, 4:], past_key_values=begun.past_key_values)
    assert (rest.logits[0] - whole.logits[0, 4:]).abs().max() < 1e-6


def engine_of(**model):
    """verl's engine before it builds a model, with the block `model` of a configuration."""
    block = {"override_config": {}, "fused_kernel_options": {}, **model}
    return SimpleNamespace(model_config=SimpleNamespace(**block))


@pytest.mark.parametrize(("name", "kept"), [("packed_sdpa", None), ("sdpa", "sdpa")])
def test_a_checkpoint_does_not_name_ours(tmp_path, name, kept):
    """verl copies the key into the configuration that it saves, and nobody else knows ours."""
    config = Qwen2Config(attn_implementation=name)
    config.attn_implementation = name
    model = SimpleNamespace(config=config)
    engine = engine_of(override_config={"attn_implementation": name})
    assert stand_in(attention.build_with_ours, lambda engine: model)(engine) is model
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.get("attn_implementation") == kept
    assert config._attn_implementation == name


@pytest.mark.parametrize("name", ["packed_sdpa", "sdpa", None])
def test_ours_is_made_known_where_a_run_asks_for_it(monkeypatch, name):
    made = []
    monkeypatch.setattr(attention, "make_known", lambda: made.append(name))
    overridden = None if name is None else {"attn_implementation": name}
    engine = engine_of(override_config=overridden, fused_kernel_options=None)
    stand_in(attention.build_with_ours, lambda engine: SimpleNamespace())(engine)
    assert made == ([name] if name == "packed_sdpa" else [])


@torch.no_grad()
def test_a_window_stays(rows):
    """A mask of all tokens then, which is right and slow."""
    make_known()
    window = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}
    config = Qwen2Config(**SIZES, **HEADS, **window)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed_sdpa").eval()
    got, expected = packed(model, rows), torch.cat(alone(model, rows))
    assert (got - expected).abs().max() < 1e-6


@torch.no_grad()
def test_rows_are_looked_for_once_a_pass(model, rows, monkeypatch):
    """Reading them waits for the GPU."""
    read = []
    original = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read.append(0) or original(self))
    packed(model, rows)
    assert len(read) == 1


@torch.no_grad()
def test_a_mask_of_the_models_own_stays(model):
    """As of an image, whose tokens see each other."""
    embedded, positions = torch.zeros(1, 4, 32), torch.arange(4)[None]
    of_all = create_causal_mask(
        config=model.config,
        inputs_embeds=embedded,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
        or_mask_function=lambda batch, head, query, key: key < 3,
    )
    assert of_all[0, 0].tolist() == [[True, True, True, False]] * 3 + [[True] * 4]


@pytest.mark.parametrize("option", ["softcap", "s_aux"])
def test_an_option_that_pytorch_does_not_know_is_refused(option):
    part = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=f"Module hands '{option}' .*attention=flash_attn"):
        attention.packed_sdpa(torch.nn.Module(), part, part, part, None, **{option: 50.0})


def test_a_model_that_hides_the_positions():
    part = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match=r"Module does not hand on position_ids.*use_remove_pad"):
        attention.packed_sdpa(torch.nn.Module(), part, part, part, None)


@pytest.mark.slow
def test_verls_engine_on_two_ranks(tmp_path):
    """Outputs and gradients of packed rows are those of each row alone; one rank has one row."""
    torch.manual_seed(0)
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, **HEADS)).save_pretrained(folder)
    run_two_ranks("packed_rank.py", tmp_path, folder)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for one in found:
        assert {*one["worst"]} == {"plain", "fused", "to a fixed length"}
        assert max(one["worst"].values()) < 1e-5, found
    # the pass itself, and once more for the gradient; 32 where it is filled up
    assert {*found[0]["tokens"]} == {20, 32} and {*found[1]["tokens"]} == {7, 32}


# --- which one -----------------------------------------------------------------------------------


@pytest.fixture
def flash_attn(monkeypatch):
    """Lets it be imported, or not."""

    def set_to(found):
        monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn") if found else None)

    return set_to


@pytest.mark.parametrize(
    ("hardware", "found", "chosen", "said"),
    [
        ("8gpu", True, "flash_attention_2", "since flash_attn can be imported"),
        ("8gpu", False, "packed_sdpa", "since flash_attn cannot be imported (ModuleNotFoundError"),
        ("cpu", True, "packed_sdpa", "since trainer.device=cpu"),
    ],
)
def test_what_auto_is(flash_attn, hardware, found, chosen, said):
    flash_attn(found)
    config = composed(f"hardware={hardware}")
    assert said in choose(config)
    assert OmegaConf.select(config, KEY) == chosen
    assert choose(config) is None  # it is said once


@pytest.mark.parametrize("name", ["sdpa", "auto"])
def test_sequence_parallelism_is_refused(flash_attn, name):
    flash_attn(False)
    key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    config = composed("hardware=8gpu", f"attention={name}", f"{key}=2")
    with pytest.raises(ValueError, match=f"{key}=2: verl splits rows .* attention=flash_attn"):
        choose(config)


def test_what_is_not_ours_stays(flash_attn):
    flash_attn(True)
    config = composed("hardware=8gpu", "attention=flash_attn")
    assert choose(config) is None
    assert OmegaConf.select(config, KEY) == "flash_attention_2"


# --- fused kernels ------------------------------------------------------------------------------

OPTIONS = "actor_rollout_ref.model.fused_kernel_options"


def asked(*overrides):
    """What verl's workers get, where no recipe of ours is used."""
    config = compose_quickly(None, "ppo_trainer", [*overrides])
    ask = stand_in(attention.ask_for_head_in_root, lambda config: "verl's own")
    assert ask(config) == "verl's own"
    return OmegaConf.to_container(OmegaConf.select(config, OPTIONS))


FUSED = "actor_rollout_ref.model.use_fused_kernels=True"
OURS = {"impl_backend": "torch", "head_in_root": True}


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        (["algorithm.adv_estimator=gdpo", FUSED], OURS),
        (["algorithm.adv_estimator=grpo", "reward.reward_manager.name=gdpo", FUSED], OURS),
        (["algorithm.adv_estimator=gdpo"], {"impl_backend": "torch"}),
        (["algorithm.adv_estimator=grpo", FUSED], {"impl_backend": "torch"}),
        (
            ["algorithm.adv_estimator=gdpo", FUSED, f"+{OPTIONS}.head_in_root=False"],
            {"impl_backend": "torch", "head_in_root": False},
        ),
    ],
)
def test_a_script_with_gdpo_asks_for_the_mend(overrides, options):
    assert asked(*overrides) == options


@pytest.mark.parametrize("estimator", ["gdpo", "grpo", "grpo_no_std"])
def test_our_recipes_ask_for_it(estimator):
    config = composed(f"estimator={estimator}", "hardware=cpu")
    assert OmegaConf.select(config, OPTIONS) == OURS


def test_a_read_only_configuration_is_no_reason_to_end():
    config = compose_quickly(None, "ppo_trainer", ["algorithm.adv_estimator=gdpo", FUSED])
    OmegaConf.set_readonly(config, True)
    stand_in(attention.ask_for_head_in_root, lambda config: None)(config)
    assert OmegaConf.select(config, OPTIONS) == OURS
    assert OmegaConf.is_readonly(config) and OmegaConf.is_readonly(config.actor_rollout_ref.model)


OF_VERL = ("dense_common", "glm4v", "qwen2_vl", "qwen3_5", "qwen3_vl")


@pytest.mark.parametrize("module", OF_VERL)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_verls_fused_forwards_read_the_weight_of_the_head(module, backend):
    functions = importlib.import_module(f"verl.models.transformers.{module}")
    forward = getattr(functions, f"forward_with_{backend}_backend")
    assert attention.reads_weight_of_head(forward)


def mended(self):
    """As of a later verl, which calls the head."""
    return self.lm_head(self.weight_of_others)


def test_other_forwards_do_not():
    assert not attention.reads_weight_of_head(Qwen2ForCausalLM.forward)
    mended.__module__ = "verl.models.transformers.dense_common"
    assert not attention.reads_weight_of_head(mended)


@pytest.mark.parametrize(
    ("is_asked", "reads_weight", "is_left_out"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_who_has_the_head_in_the_root(is_asked, reads_weight, is_left_out):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(2, 2)
            self.config = SimpleNamespace(tie_word_embeddings=False)

    if reads_weight:
        Model.forward = dense_common.forward_with_torch_backend
    options = {"head_in_root": True} if is_asked else {}
    build = stand_in(attention.build_with_ours, lambda engine: Model())
    model = build(engine_of(fused_kernel_options=options))
    targets = fsdp_utils._select_fsdp2_wrap_targets(model, ["Layer"])
    assert targets == ([] if is_left_out else [model.lm_head])


@pytest.mark.slow
def test_fused_kernels_under_fsdp2(tmp_path):
    """On two ranks, against the model without either."""
    run_two_ranks("fused_rank.py", tmp_path)
    worst = {path.stem: float(path.read_text()) for path in tmp_path.glob("*.txt")}
    assert {*worst} == {
        f"{model}-{rank}" for model in ("tied", "untied", "lora") for rank in (0, 1)
    }
    assert max(worst.values()) < 1e-5, worst
