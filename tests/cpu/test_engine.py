"""The no-GPU engine: activation, tiny model, sampling, batching, weights. No trainer, no Ray."""

import asyncio
import os
import sys
import threading
import types

import pytest
import torch
import transformers

from verl_gdpo.cpu import plugin, sampler
from verl_gdpo.cpu.engine import Batcher, Engine, load_full_state
from verl_gdpo.cpu.sampler import Completion, Request, SamplingParams, draw
from verl_gdpo.hooks.extend import extend_module
from workshop.tiny_policy.model import make_tiny_model

TEXTS = [f"What is {a} plus {b}? The answer is {a + b}." for a in range(10) for b in range(10)]
PROMPTS = [[65], [70, 71, 72, 73, 74, 75, 76], [80, 81, 82], [90, 91, 92, 93]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    # A wide initial distribution, so that different contexts prefer different tokens.
    folder = tmp_path_factory.mktemp("cpu") / "model"
    return make_tiny_model(
        folder, texts=TEXTS, hidden_size=32, initializer_range=0.3, max_position_embeddings=128
    )


@pytest.fixture(scope="module")
def model(model_dir):
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir).eval()


def requests_for(prompts, max_tokens, **params):
    return [Request(p, SamplingParams(**params), max_tokens, i) for i, p in enumerate(prompts)]


def check_log_probs(model, prompt, out, temperature=1.0):
    """Check the log-probabilities by one unpadded forward pass without a cache.

    Where the temperature is 0, the response must have the likeliest tokens.
    """
    with torch.no_grad():
        logits = model(torch.tensor([prompt + out.token_ids])).logits[0, len(prompt) - 1 : -1]
    assert temperature or logits.argmax(dim=-1).tolist() == out.token_ids
    table = (logits.float() / (temperature or 1.0)).log_softmax(dim=-1)
    expected = table.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(out.log_probs), expected, atol=1e-5, rtol=0)


def make_engine(model_dir, **overrides):
    config = transformers.AutoConfig.from_pretrained(model_dir)
    blank = transformers.AutoModelForCausalLM.from_config(config)
    settings = {"prompt_length": 16, "response_length": 8, "max_model_len": 64, "max_batch": 64}
    return Engine(blank, eos_ids=[2], pad_id=0, **{**settings, **overrides})


@pytest.fixture
def answers(model_dir, model):
    """(requests, step, settings of an engine) -> what it says to requests that come at once."""

    async def ask(requests, step, settings):
        engine = make_engine(model_dir, **settings)
        await engine.load_weights(model.state_dict(), global_steps=step)
        jobs = [engine.generate(*request) for request in requests]
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 30)

    return lambda requests, step=1, **settings: asyncio.run(ask(requests, step, settings))


# ---- activation ------------------------------------------------------------------------------


@pytest.fixture
def run_python(run_forked):
    """Runs code in a new process in which verl loads the CPU plugin."""

    def run(code, **env):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
        plugin = {
            "VERL_USE_EXTERNAL_PLUGINS": "none",
            "VERL_USE_EXTERNAL_MODULES": "verl_gdpo.cpu.plugin",
        }
        return run_forked(code, {**clean, **plugin, **env})

    return run


@pytest.mark.slow
def test_nothing_happens_without_the_variable(run_python):
    done = run_python(
        "import os, sys, verl\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "from verl.workers.rollout import base, replica\n"
        "assert 'verl_gdpo.cpu.plugin' in sys.modules\n"
        "assert 'verl_gdpo.cpu.device' not in sys.modules\n"
        "assert 'cpu' not in PlatformRegistry.registered_names()\n"
        "assert 'VERL_ENGINE_DEVICE' not in os.environ\n"
        "assert ('hf', 'async') not in base._ROLLOUT_REGISTRY\n"
        "assert 'hf' not in replica.RolloutReplicaRegistry._registry\n"
        "from verl.checkpoint_engine import CheckpointEngineRegistry\n"
        "assert 'gloo' not in CheckpointEngineRegistry._registry\n"
    )
    assert done.returncode == 0, done.stderr


ACTIVE_CODE = """
import asyncio, gc, os, pytest, sys, verl
assert gc.get_threshold()[0] == 10_000
from types import SimpleNamespace
heavy = [m for m in ("verl.workers.rollout.base", "verl_gdpo.cpu.rollout") if m in sys.modules]
assert not heavy, heavy
from verl.utils.device import get_device_name, get_torch_device
assert get_device_name() == "cpu"
get_torch_device().empty_cache()
free, total = get_torch_device().mem_get_info()
assert 0 < free <= total
with pytest.raises(AttributeError, match="graph_pool_handle"):
    get_torch_device().graph_pool_handle
import torch
import torch.distributed as dist
from verl.utils import distributed
os.environ.update(
    RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", DIST_INIT_METHOD=f"file://{sys.argv[-1]}/store"
)
distributed.initialize_global_process_group_ray()
dist.all_reduce(torch.ones(1))
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.utils.fsdp_utils import fsdp2_sharded_load_from_cpu, fsdp2_sharded_save_to_cpu
layer = fully_shard(torch.nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
old = layer.weight.full_tensor().clone()
kept = fsdp2_sharded_save_to_cpu(layer)
with torch.no_grad():
    layer.weight.add_(1)
fsdp2_sharded_load_from_cpu(layer, *kept)
assert torch.equal(layer.weight.full_tensor(), old)
dist.destroy_process_group()
from verl.checkpoint_engine import CheckpointEngineRegistry
assert CheckpointEngineRegistry.get("gloo").__module__ == "verl_gdpo.cpu.checkpoint_engine"
from verl.workers.engine.fsdp import transformer_impl
assert transformer_impl.CPUOffloadPolicy(pin_memory=True).pin_memory is False
from verl.workers.engine.base import EngineRegistry
assert EngineRegistry.get_engine_cls("language_model", "fsdp2").__module__ == (
    transformer_impl.__name__)
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from verl_gdpo.cpu import rollout
assert get_rollout_class("hf") is rollout.HFServerAdapter
assert get_rollout_replica_class("hf") is rollout.HFReplica
options = dict(name="hf", tensor_model_parallel_size=1, prompt_length=16, response_length=8)
with pytest.raises(ValueError, match="dtype=float16 .expected one of float32, fp32, bfloat16"):
    rollout.HFServerAdapter(RolloutConfig(**options, dtype="float16"), None, None, 0)
half = RolloutConfig(**options, dtype="bfloat16")
rollout.check_rollout_config(half)
config = RolloutConfig(**options, dtype="float32")
rollout.check_rollout_config(config)

folder = sys.argv[-2]
model_config = HFModelConfig(path=folder, override_config={"attn_implementation": "sdpa"})
server = rollout.HFServer(config, model_config)
from transformers import AutoModelForCausalLM
weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()

async def use():
    await server.load_weights(weights, 3)
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
    with pytest.raises(NotImplementedError, match="image_data"):
        await server.generate([65], params, "a", image_data=["picture"])
    quiet = await server.generate([65], {**params, "logprobs": False}, "b", new_keyword=1)
    assert quiet.log_probs is None
    out = await server.generate([65, 66], {**params, "logprobs": True}, "c", image_data=None)
    assert len(out.token_ids) == len(out.log_probs) >= 1
    assert out.stop_reason == "completed" and out.extra_fields["global_steps"] == 3
    none = {"aborted_count": 0, "request_ids": []}
    assert await server.abort_all_requests(reject_request=True) == none
    back = await server.generate([65, 66], {**params, "logprobs": True}, "d")
    assert (back.token_ids, back.stop_reason) == ([], "aborted")
    assert await server.abort_all_requests() == none
    await server.resume_generation()
    await server.wake_up(tags=["weights"])

asyncio.run(use())

async def send():
    import torch
    server = rollout.HFServer(half, model_config)
    adapter = rollout.HFServerAdapter(half, model_config, None, replica_rank=0)
    async def load(state, steps):
        assert {weight.dtype for weight in state.values()} == {torch.bfloat16}
        await server.load_weights(state, steps)
    adapter._server = SimpleNamespace(load_weights=SimpleNamespace(remote=load))
    await adapter.update_weights(iter(weights.items()), global_steps=4)
    assert {weight.dtype for weight in server._engine.model.parameters()} == {torch.bfloat16}
    params = {"temperature": 1.0, "logprobs": True, "seed": 1}
    out = await server.generate([65, 66], params, "e")
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[65, 66]])).logits
    expected = logits[0, -1].log_softmax(-1)[out.token_ids[0]].item()
    assert abs(out.log_probs[0] - expected) < 0.05, (out.log_probs[0], expected)

asyncio.run(send())
print("all good")
"""


@pytest.mark.slow
def test_verl_runs_on_cpu_with_the_variable(run_python, model_dir, tmp_path):
    code = f"import sys; sys.argv = ['', {str(model_dir)!r}, {str(tmp_path)!r}]\n" + ACTIVE_CODE
    done = run_python(code, VERL_PLATFORM="cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("all good")


def test_on_a_gpu_the_rollout_comes_alone(run_python):
    done = run_python(
        "import os, verl\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "from verl.workers.rollout.base import get_rollout_class\n"
        "from verl.workers.rollout.replica import get_rollout_replica_class\n"
        "from verl_gdpo.cpu import rollout\n"
        "assert get_rollout_class('hf') is rollout.HFServerAdapter\n"
        "assert get_rollout_replica_class('hf') is rollout.HFReplica\n"
        "assert 'cpu' not in PlatformRegistry.registered_names()\n"
        "assert 'VERL_ENGINE_DEVICE' not in os.environ\n",
        VERL_USE_EXTERNAL_MODULES="workshop.gpu_kit.hf_rollout",
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_symbol_is_named_with_the_tested_versions(monkeypatch, capsys):
    stub = types.ModuleType("verl")
    stub.__version__ = "0.99.0"
    monkeypatch.setitem(sys.modules, "verl", stub)
    module = types.ModuleType("verl.utils.distributed")
    monkeypatch.setitem(sys.modules, "verl.utils.distributed", module)
    extensions = [each for each in plugin.ON_CPU if each.module == module.__name__]
    symbol = r"initialize_global_process_group_ray\(backend\)"
    for there in ({}, {"initialize_global_process_group_ray": lambda timeout_second: None}):
        vars(module).update(there)
        with pytest.raises(ImportError, match=f"{symbol} .verl 0.99.0; tested: 0.9.0, 0.9.1"):
            extend_module(module, extensions, plugin.refuse_verl)
    assert "initialize_global_process_group_ray(backend)" in capsys.readouterr().err


def test_a_model_that_takes_no_cache_is_refused():
    config = transformers.MambaConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1)
    with pytest.raises(NotImplementedError, match="MambaForCausalLM takes no DynamicCache"):
        [*sampler.sample(transformers.MambaForCausalLM(config), requests_for([[3]], 2), 0)]


# ---- tiny model ------------------------------------------------------------------------------


def test_tiny_tokenizer_speaks_chatml(model_dir, model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\n1 + 1?"}]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi\n1 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("\n")) == 1
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert len(tokenizer.encode("<|im_start|><|im_end|>")) == 2
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    assert model.dtype == torch.float32


# ---- sampling --------------------------------------------------------------------------------


def sample(*args):
    """The outcomes in the order of the requests."""
    return [outcome for _, outcome in sorted(sampler.sample(*args), key=lambda each: each[0])]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_equal_a_plain_forward_pass(model, temperature):
    requests = requests_for(PROMPTS, max_tokens=12, temperature=temperature)
    for prompt, out in zip(PROMPTS, sample(model, requests, 0), strict=True):
        assert (len(out.token_ids), out.finish) == (12, "length")
        check_log_probs(model, prompt, out, temperature)


def tiny(kind, **sizes):
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, initializer_range=0.1, pad_token_id=0, **sizes,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


FALCON = {"d_ssm": 32, "n_heads": 4, "d_head": 8, "n_groups": 1, "d_state": 8, "chunk_size": 8}
FALCON = {f"mamba_{name}": size for name, size in FALCON.items()}


@pytest.mark.parametrize(
    ("kind", "sizes"), [("gemma2", {"sliding_window": 6}), ("falcon_h1", FALCON)]
)
def test_a_model_with_a_cache_of_its_own_keeps_its_probabilities(kind, sizes):
    model = tiny(kind, **sizes)
    requests = [Request(p, SamplingParams(), 4 + 5 * i, i) for i, p in enumerate(PROMPTS)]
    for prompt, out in zip(PROMPTS, sample(model, requests, 0), strict=True):
        check_log_probs(model, prompt, out)


def test_batched_equals_one_by_one(model):
    # Rows end at different steps, and by different causes.
    free = sample(model, requests_for(PROMPTS, max_tokens=12), 0)
    params = SamplingParams(stop_ids=frozenset({free[1].token_ids[6]}))
    requests = [Request(p, params, 4 + 5 * i, i) for i, p in enumerate(PROMPTS)]
    together = sample(model, requests, 0)
    assert {out.finish for out in together} == {"length", "stop"}
    for request, out in zip(requests, together, strict=True):
        (alone,) = sample(model, [request], 0)
        assert (alone.token_ids, alone.finish) == (out.token_ids, out.finish)
        assert alone.log_probs == pytest.approx(out.log_probs, abs=1e-5)


def test_a_response_ends_with_its_first_stop_token_and_no_other(model, monkeypatch):
    (free,) = sample(model, requests_for([PROMPTS[0]], max_tokens=12), 0)
    assert free.finish == "length"
    stop = free.token_ids[5]
    for config in (model.config, model.generation_config):
        monkeypatch.setattr(config, "eos_token_id", stop)
    assert sample(model, requests_for([PROMPTS[0]], max_tokens=12), 0) == [free]
    cut = free.token_ids[: free.token_ids.index(stop) + 1]
    params = {"max_tokens": 12, "stop_ids": frozenset({stop, 9999})}
    (stopped,) = sample(model, requests_for([PROMPTS[0]], **params), 0)
    assert (stopped.token_ids, stopped.finish) == (cut, "stop")
    assert stopped.log_probs == pytest.approx(free.log_probs[: len(cut)], abs=1e-6)


def test_a_prompt_is_read_once_and_what_has_ended_is_dropped(model, monkeypatch):
    rows, forward = [], model.forward
    counted = lambda **given: rows.append(given["input_ids"].numel()) or forward(**given)  # noqa: E731
    monkeypatch.setattr(model, "forward", counted)
    requests = [Request(PROMPTS[1], SamplingParams(), length, length) for length in (4, 1, 1)]
    assert [k for k, _ in sampler.sample(model, requests, 0)] == [1, 2, 0]  # as they end
    assert rows == [7, 3, 1, 1]


def drawn(probs, count, **params):
    """Tokens and log-probabilities of `count` draws from `probs`."""
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0))
    return draw(SamplingParams(**params), torch.tensor(probs).log().repeat(count, 1), uniform)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.3, 0.05, 0.5, 0.15]),
        # squares, of .3 ** 2 + .05 ** 2 + .5 ** 2 + .15 ** 2 = .365
        ({"temperature": 0.5}, [0.09 / 0.365, 0.0025 / 0.365, 0.25 / 0.365, 0.0225 / 0.365]),
        # top-k 2 leaves .5, .3 = .625, .375 of their sum
        ({"top_k": 2}, [0.375, 0.0, 0.625, 0.0]),
        # mass .5 < .7 needs a second token; .8 >= .7 needs no third
        ({"top_p": 0.7}, [0.375, 0.0, 0.625, 0.0]),
        # .8 < .9 needs a third: .5, .3, .15 of .95
        ({"top_p": 0.9}, [0.3 / 0.95, 0.0, 0.5 / 0.95, 0.15 / 0.95]),
        # top-p counts what top-k left: .625 >= .6, though .5 < .6
        ({"top_k": 2, "top_p": 0.6}, [0.0, 0.0, 1.0, 0.0]),
        ({"top_p": 1e-9}, [0.0, 0.0, 1.0, 0.0]),
        # log-probabilities of a greedy draw are those without any cut, as in vLLM
        ({"temperature": 0.0, "top_k": 1}, [0.0, 0.0, 0.5, 0.0]),
    ],
)
def test_tokens_are_drawn_by_their_probabilities(params, expected):
    tokens, log_probs = drawn([0.3, 0.05, 0.5, 0.15], 4000, **params)
    assert torch.allclose(log_probs.exp(), torch.tensor(expected)[tokens])
    shares = torch.bincount(tokens, minlength=4) / 4000
    if params.get("temperature") == 0.0:
        expected = [0.0, 0.0, 1.0, 0.0]
    # five standard deviations of a share of 4,000 at most: 5 * sqrt(.25 / 4000) = .04
    assert torch.allclose(shares, torch.tensor(expected), atol=0.04, rtol=0)
    assert not shares[torch.tensor(expected) == 0].any()


def test_the_ends_of_the_unit_interval_draw_no_cut_token():
    uniform = torch.tensor([0.0, 1 - 2**-24])  # the least and the most of torch.rand
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().repeat(2, 1)
    assert draw(SamplingParams(top_k=2), logits, uniform)[0].tolist() == [1, 2]


def test_a_row_without_finite_logits_fails_alone(model):
    def poison(module, args, kwargs, out):
        out.logits[kwargs["input_ids"][:, -1] == PROMPTS[1][-1]] = torch.nan

    hook = model.register_forward_hook(poison, with_kwargs=True)
    try:
        good, bad = sample(model, requests_for(PROMPTS[:2], max_tokens=3), 0)
    finally:
        hook.remove()
    assert len(good.token_ids) == 3
    assert isinstance(bad, FloatingPointError)
    assert "response token 1" in str(bad)


def test_abort_returns_the_tokens_so_far(model):
    answers = iter([False, False, True])
    full = sample(model, requests_for(PROMPTS, max_tokens=9), 0)
    cut = sample(model, requests_for(PROMPTS, max_tokens=9), 0, lambda: next(answers))
    for whole, part in zip(full, cut, strict=True):
        assert part.finish == "aborted"
        assert part.token_ids == whole.token_ids[:3]
        assert len(part.log_probs) == 3


# ---- sampling options ------------------------------------------------------------------------


def test_what_verl_sends_is_understood():
    raw = {
        "temperature": 1.0, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True,
        "stop": [], "max_tokens": 500, "stop_token_ids": [7], "seed": None,
    }  # fmt: skip
    params = sampler.parse_sampling_params(raw, eos_ids=[2])
    assert params == SamplingParams(1.0, 0.9, -1, frozenset({2, 7}))


def test_end_tokens():
    def stop_ids(ignore_eos=False, **raw):
        return sampler.parse_sampling_params(raw, eos_ids=[2], ignore_eos=ignore_eos).stop_ids

    assert stop_ids() == {2}
    assert stop_ids(ignore_eos=True) == set()
    assert stop_ids(ignore_eos=True, stop_token_ids=[4]) == {4}


def test_lengths():
    def length(**raw):
        return sampler.parse_max_tokens(raw, default=8, room=100)

    assert length() == length(max_tokens=None) == 8
    assert length(max_tokens=500) == 100
    assert length(max_new_tokens=3) == 3
    assert length(max_tokens=0) == 1  # as verl's vLLM server


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty = 1.1"),
        ({"stop": ["</answer>"]}, "stop = "),
        ({"n": 2}, "n = 2"),
        ({"guided_json": {}}, "guided_json"),
        ({"temperature": -1.0}, r"`temperature` \(=-1.0\)"),
        ({"temperature": float("nan")}, r"`temperature` \(=nan\)"),
        ({"top_p": 1.5}, "`top_p` .* 1.5"),
        ({"top_k": -2}, "`top_k` .* -2"),
        ({"top_k": 1.5}, "`top_k` .* 1.5"),
    ],
)
def test_unsupported_options_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        sampler.parse_sampling_params(bad, eos_ids=[2])


# ---- engine: weights, requests, abort --------------------------------------------------------


def test_no_tokens_before_the_first_weights(model_dir, model):
    async def use():
        engine = make_engine(model_dir)
        with pytest.raises(RuntimeError, match="before a complete set of weights"):
            await engine.generate([65], {})
        await engine.load_weights(model.state_dict(), global_steps=4)
        return await engine.generate([65], {})

    out = asyncio.run(use())
    assert out.global_steps == 4
    check_log_probs(model, [65], out)


def test_weights_that_do_not_fit_raise_and_stop_generation(model_dir, model):
    state = model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    bad_states = {
        "missing 1": {k: v for k, v in state.items() if k != name},
        "unknown 1": {**state, "model.extra.weight": torch.zeros(1)},
        f"size mismatch for {name}": {**state, name: torch.zeros(3, 4)},
    }

    async def use(bad, message):
        engine = make_engine(model_dir)
        await engine.load_weights(state)
        with pytest.raises((ValueError, RuntimeError), match=message):
            await engine.load_weights(bad)
        with pytest.raises(RuntimeError, match="complete set of weights"):
            await engine.generate([65], {})

    for message, bad in bad_states.items():
        asyncio.run(use(bad, message))


def test_tied_weights_may_come_under_one_name(tmp_path):
    folder = make_tiny_model(tmp_path / "a", texts=TEXTS, hidden_size=32, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    state = {k: torch.ones_like(v) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    load_full_state(model, state)
    assert bool((model.lm_head.weight == 1).all())


def test_sampling_repeats_whatever_the_arrival_order(answers):
    def responses(order, **how):
        outs = answers([(PROMPTS[i], {}) for i in order], **how)
        return sorted((i, out.token_ids) for i, out in zip(order, outs, strict=True))

    first = responses([0, 0, 1, 2, 0])
    assert responses([2, 0, 1, 0, 0]) == first
    assert len({str(tokens) for i, tokens in first if i == 0}) == 3
    assert responses([0, 0, 1, 2, 0], seed=1) != first
    assert responses([0, 0, 1, 2, 0], step=2) != first


def test_a_session_has_its_own_responses_whatever_arrives_first(answers):
    def responses(order):
        outs = answers([(PROMPTS[0], {"session": session}) for session in order])
        return sorted((s, out.token_ids) for s, out in zip(order, outs, strict=True))

    first = responses([0, 1, 2])
    assert responses([2, 0, 1]) == first
    assert len({str(tokens) for _, tokens in first}) == 3


def test_verl_tells_the_rollout_which_sample_of_a_prompt_it_wants(run_python):
    done = run_python(
        "import asyncio, types, verl\n"
        "from omegaconf import OmegaConf\n"
        "import verl.experimental.agent_loop.agent_loop as module\n"
        "seen = []\n"
        "class Loop:\n"
        "    def __init__(self, **given): pass\n"
        "    async def run(self, sampling_params, **given): seen.append(sampling_params)\n"
        "module._agent_loop_registry['one'] = {'_target_': '__main__.Loop'}\n"
        "module.hydra.utils.instantiate = lambda config, **given: Loop()\n"
        "class Worker(module.AgentLoopWorker):\n"
        "    def __init__(self, rollout):\n"
        "        given = {'actor_rollout_ref': {'rollout': {'name': rollout}}, 'data': {}}\n"
        "        self.config = OmegaConf.create(given)\n"
        "        self.tokenizer = self.processor = self.llm_client = self.hf_model_type = None\n"
        "        self.dataset_cls = None\n"
        "        self.tools = []\n"
        "    async def _agent_loop_postprocess(self, *args, **given): pass\n"
        "step = dict(step=1, sample_index=0, rollout_n=0, validate=False)\n"
        "for rollout in ('hf', 'vllm'):\n"
        "    for given in ({'session_id': 3}, {}):\n"
        "        call = Worker(rollout)._run_agent_loop({'top_k': 5}, step, agent_name='one', "
        "trace=False, **given)\n"
        "        asyncio.run(call)\n"
        "print(seen)\n"
        "assert seen == [{'top_k': 5, 'session': 3}] + 3 * [{'top_k': 5}]\n",
        VERL_USE_EXTERNAL_MODULES="workshop.gpu_kit.hf_rollout",
    )
    assert done.returncode == 0, done.stderr


def test_a_seed_in_the_request_fixes_the_response(answers):
    first, second, third = answers([([65], {"seed": seed}) for seed in (1, 1, 2)])
    assert first.token_ids == second.token_ids != third.token_ids


def test_requests_of_one_batch_may_differ_in_their_options(model_dir, model):
    options = [{}, {"temperature": 0}, {"top_k": 3, "top_p": 0.9}, {}, {"max_tokens": 2}]

    async def use(together):
        engine = make_engine(model_dir)
        sizes = []
        run = engine.batcher.run
        engine.batcher.run = lambda requests, abort: (
            sizes.append(len(requests)) or run(requests, abort)
        )
        await engine.load_weights(model.state_dict(), global_steps=1)
        jobs = [engine.generate(PROMPTS[1], {"seed": k, **o}) for k, o in enumerate(options)]
        outs = await asyncio.gather(*jobs) if together else [await job for job in jobs]
        return sizes, [(out.token_ids, out.global_steps) for out in outs]

    sizes, together = asyncio.run(use(together=True))
    alone_sizes, alone = asyncio.run(use(together=False))
    assert (sizes, alone_sizes) == ([5], [1] * 5)
    assert together == alone
    assert len({str(tokens) for tokens, _ in alone}) == 5


def test_a_bad_request_fails_alone(answers):
    options = [{"repetition_penalty": 2.0}, {"top_p": 2.0}, {"seed": -1}]
    requests = [([], {}), ([10_000], {}), ([65] * 64, {}), *(([65], of) for of in options)]
    good, *bad, also_good = answers([([65], {}), *requests, ([66], {})])
    assert isinstance(good, Completion)
    assert isinstance(also_good, Completion)
    messages = ["has 0 tokens", "vocabulary", "64 tokens", "repetition", "top_p", "non-negative"]
    for error, message in zip(bad, messages, strict=True):
        assert isinstance(error, ValueError)
        assert message in str(error)


ONE = Request([1], SamplingParams(), 1)


def fake_completions(requests, should_abort):
    return enumerate(Completion([1], [0.0], "stop") for _ in requests)


def test_concurrent_requests_share_a_batch_up_to_the_limit():
    sizes = []

    def run(requests, should_abort):
        sizes.append(len(requests))
        return fake_completions(requests, should_abort)

    async def use():
        batcher = Batcher(run, max_batch=4)
        await asyncio.gather(*(batcher.submit(ONE) for _ in range(10)))

    asyncio.run(use())
    assert sizes == [4, 4, 2]


def test_after_a_long_batch_late_requests_are_waited_for(monkeypatch):
    sizes, clock = [], types.SimpleNamespace(now=0, monotonic=lambda: clock.now)
    monkeypatch.setattr("verl_gdpo.cpu.engine.time", clock)

    def run(requests, should_abort):
        sizes.append(len(requests))
        clock.now += 20
        return fake_completions(requests, should_abort)

    async def late(batcher):
        await asyncio.sleep(0.1)  # longer than `quiet_s`
        await batcher.submit(ONE)

    async def use():
        batcher = Batcher(run, max_batch=4)
        await batcher.submit(ONE)
        await asyncio.gather(batcher.submit(ONE), late(batcher))

    asyncio.run(use())
    assert sizes == [1, 2]


def test_a_failing_batch_does_not_hang_later_requests():
    def run(requests, should_abort):
        if len(requests) > 1:
            raise MemoryError("too much")
        return fake_completions(requests, should_abort)

    async def use():
        batcher = Batcher(run, max_batch=4)
        three = [batcher.submit(ONE) for _ in range(3)]
        failed = await asyncio.gather(*three, return_exceptions=True)
        return failed, await asyncio.wait_for(batcher.submit(ONE), 10)

    failed, later = asyncio.run(use())
    assert [type(error) for error in failed] == [RuntimeError] * 3
    assert "3 responses failed: MemoryError('too much')" in str(failed[0])
    assert later.token_ids == [1]


@pytest.fixture
def started():
    return threading.Event()


def test_a_response_comes_back_while_others_run(started):
    def run(requests, should_abort):
        yield 1, Completion([1], [0.0], "stop")
        yield 0, Completion([2], [0.0], "stop" if started.wait(10) else "length")

    async def use():
        batcher = Batcher(run, max_batch=2)
        long, short = (asyncio.create_task(batcher.submit(ONE)) for _ in range(2))
        await short
        started.set()
        return await long

    assert asyncio.run(use()).finish == "stop"


@pytest.fixture
def first_hangs(started):
    """Runs the first request until it is aborted."""

    def run(requests, should_abort):
        if started.is_set():
            return fake_completions(requests, should_abort)
        started.set()
        while not should_abort():
            pass
        return [(0, Completion([5], [0.0], "aborted"))]

    return run


def test_abort_hands_back_and_parks_until_resume(started, first_hangs):
    async def use():
        batcher = Batcher(first_hangs, max_batch=1)
        running = asyncio.create_task(batcher.submit(ONE))
        await asyncio.to_thread(started.wait, 10)
        waiting = asyncio.create_task(batcher.submit(Request([2], SamplingParams(), 1)))
        await asyncio.sleep(0)
        assert await batcher.abort() == 1
        assert (await running).finish == "aborted"
        parked = asyncio.create_task(batcher.submit(Request([3], SamplingParams(), 1)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert not parked.done()
        batcher.resume()
        done = await asyncio.wait_for(asyncio.gather(waiting, parked), 10)
        assert [out.finish for out in done] == ["stop", "stop"]

    asyncio.run(use())


def test_a_server_that_leaves_hands_all_requests_back(started, first_hangs):
    async def use():
        batcher = Batcher(first_hangs, max_batch=1)
        requests = [Request([number], SamplingParams(), 1) for number in range(3)]
        running, waiting = (asyncio.create_task(batcher.submit(one)) for one in requests[:2])
        await asyncio.to_thread(started.wait, 10)
        await batcher.abort(hand_back=True)
        late = asyncio.create_task(batcher.submit(requests[2]))
        found = await asyncio.wait_for(asyncio.gather(running, waiting, late), 10)
        assert [out.token_ids for out in found] == [[5], [], []]
        assert {out.finish for out in found} == {"aborted"}
        batcher.resume()
        return await asyncio.wait_for(batcher.submit(requests[0]), 10)

    assert asyncio.run(use()).finish == "stop"


def test_a_caller_that_leaves_does_not_disturb_the_batch():
    async def use():
        batcher = Batcher(fake_completions, max_batch=4)
        leaving = asyncio.create_task(batcher.submit(ONE))
        staying = asyncio.create_task(batcher.submit(ONE))
        await asyncio.sleep(0)
        leaving.cancel()
        return await asyncio.wait_for(staying, 10)

    assert asyncio.run(use()).finish == "stop"
