import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_chat_model import make_chat_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_gdpo.tools.evaluate.dialogues import Prompt
from verl_gdpo.tools.evaluate.engines import (
    BATCH_TOKENS,
    Tokens,
    batches,
    choose_engine,
    load_engine,
)

TEXTS = ["a", "Weather in Oslo?", "b" * 60, "Two words", "ü" * 9, "x " * 30, "1 + 1 =", "Lima"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("model"))


def asked(text):
    return [{"role": "user", "content": text}]


def engine_of(model, name="transformers", temperature=0.0):
    return load_engine(name, model, {}, 24, temperature, "float32")


def all_answers(engine, prompts):
    found = {k: answer for batch in engine.answers(prompts) for k, answer in batch.items()}
    return [found[k] for k in range(len(prompts))]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_batch_of_many_equals_one_by_one(model, temperature):
    engine = engine_of(model, temperature=temperature)
    prompts = [engine.prompt(asked(text), seed) for seed, text in enumerate(TEXTS)]
    alone = [answer for prompt in prompts for answer in all_answers(engine, [prompt])]
    assert all_answers(engine, prompts) == alone
    assert all_answers(engine, prompts[::-1]) == alone[::-1]
    assert len({answer.text for answer in alone}) > 4


def test_greedy_takes_the_likeliest_token_each_time(model):
    engine = engine_of(model)
    prompt = engine.prompt(asked("Weather in Oslo?"), 0)
    (answer,) = all_answers(engine, [prompt])
    whole = AutoModelForCausalLM.from_pretrained(model)
    ids = list(prompt.ids)
    while len(ids) < len(prompt.ids) + 24 and ids[-1] != 256:
        ids.append(int(whole(torch.tensor([ids])).logits[0, -1].argmax()))
    new = ids[len(prompt.ids) :]
    text = AutoTokenizer.from_pretrained(model).decode(new, skip_special_tokens=True)
    assert (answer.text, answer.tokens) == (text, len(new))
    assert answer.is_cut == (new[-1] != 256)


def test_a_prompt_is_the_chat_template_up_to_the_answer(model):
    prompt = Tokens(model, {}).prompt([{"role": "system", "content": "s"}, *asked("q")], 7)
    assert prompt.text == "system: s\nuser: q\nassistant:" and prompt.seed == 7
    assert len(prompt.ids) == len(prompt.text)  # its tokens are bytes, and none is added
    polite = Tokens(model, {"polite": True}).prompt(asked("q"), 0)
    assert polite.text == "user: q\npleaseassistant:"


def test_the_end_of_the_prompt_says_whether_it_opens_the_thought(model):
    tokens = Tokens(model, {})
    ids = tokens.tokenizer("a</think>4", add_special_tokens=False)["input_ids"]
    for end, given in (("", ""), ("<think>", "<think>")):
        prompt = Prompt("", tokens.tokenizer("q" + end, add_special_tokens=False)["input_ids"])
        answer = tokens.answer(prompt, ids, is_cut=False)
        assert (answer.text, answer.response.answer) == ("a</think>4", "4")
        assert answer.response.turns[0].given == given


def test_a_tokenizer_without_a_chat_template_is_refused(model, tmp_path):
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        Tokens(tmp_path, {})


def test_a_model_that_gives_no_numbers_is_an_error_and_no_wrong_answer(model):
    engine = engine_of(model)
    engine._model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        all_answers(engine, [engine.prompt(asked("a"), 0)])


def test_batches_hold_each_prompt_once_the_longest_first():
    lengths = [10, 2000, 300, 300, 9000, 1]
    found = list(batches(lengths, 1000))
    assert [lengths[k] for batch in found for k in batch] == [9000, 2000, 300, 300, 10, 1]
    assert sorted(k for batch in found for k in batch) == [*range(6)]
    for batch in found:
        assert len(batch) * (lengths[batch[0]] + 1000) <= BATCH_TOKENS
    assert list(batches([50_000], 1000)) == [[0]]


class FakeLLM:
    """What we use of vLLM's class `LLM`: it answers with the first tokens of the prompt."""

    def __init__(self, model, dtype, seed):
        self.given, self.calls = (model, dtype, seed), []
        config = SimpleNamespace(max_model_len=99)
        self.llm_engine = SimpleNamespace(model_config=config)

    def generate(self, prompts, params):
        self.calls.append((prompts, params))
        for prompt, chosen in zip(prompts, params, strict=True):
            ids = [*prompt["prompt_token_ids"][: chosen.max_tokens], 256]
            is_cut = len(ids) > chosen.max_tokens
            ids = ids[: chosen.max_tokens]
            output = SimpleNamespace(token_ids=ids, finish_reason="length" if is_cut else "stop")
            yield SimpleNamespace(outputs=[output])


@pytest.fixture
def vllm(monkeypatch):
    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)


def test_vllm_gets_tokens_and_a_stream_for_each_prompt(model, vllm):
    engine = engine_of(model, "vllm", temperature=0.5)
    prompts = [engine.prompt(asked(text), 2**40 + seed) for seed, text in enumerate("abc")]
    found = all_answers(engine, prompts)
    # the prompt "user: a\nassistant:" has 18 bytes and the end; none was cut
    assert [(one.text, one.tokens, one.is_cut) for one in found] == [
        (prompt.text, 19, False) for prompt in prompts
    ]
    params = [one for _, of_call in engine._llm.calls for one in of_call]
    assert len({one.seed for one in params}) == 3 and all(one.seed < 2**31 for one in params)
    chosen = {"max_tokens": 24, "temperature": 0.5}
    assert chosen.items() <= vars(params[0]).items()
    assert engine.positions == 99 and engine._llm.given == (str(model), "float32", 0)
    (long,) = all_answers(engine, [engine.prompt(asked("long" * 9), 0)])
    assert long.is_cut and long.tokens == 24


def test_vllm_is_refused_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed"):
        choose_engine("vllm")
    assert choose_engine(None) == "transformers"
