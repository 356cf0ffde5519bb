"""What generates answers: vLLM where it is installed beside a GPU, else transformers.

Both get token ids, and give back texts without special tokens. A sample is drawn from a random
stream of its own. Relies on vLLM 0.24: `LLM`, `SamplingParams`.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_gdpo.cpu.sampler import Completion, Request, SamplingParams, end_ids, sample
from verl_gdpo.scoring.response import TAGS, ResponseReader, Tags
from verl_gdpo.tools.evaluate.benchmark import Answer, Messages
from verl_gdpo.tools.evaluate.dialogues import AnswerEngine, Prompt

# A batch of transformers may hold so many tokens: its prompts and their answers.
BATCH_TOKENS = 32_768


def choose_engine(wanted: str | None) -> str:
    """Return the engine that this machine has; raise ValueError if the wanted one is not here."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not has_vllm:
        raise ValueError("--engine vllm: vLLM is not installed here; --engine transformers")
    if wanted:
        return wanted
    if has_vllm and torch.cuda.is_available():
        return "vllm"
    return "transformers"


def load_engine(
    name: str,
    model: Path,
    template_options: Mapping[str, Any],
    max_tokens: int,
    temperature: float,
    dtype: str,
    tags: Sequence[Tags] = TAGS,
    kept: Sequence[str] = (),
) -> AnswerEngine:
    """Load a model.

    Args:
        template_options: keywords for the chat template, such as `enable_thinking`.
        max_tokens: the limit of an answer.
        temperature: 0 is greedy.
        tags: between which the model thinks.
        kept: tags that scorers see, also if they are special tokens; see `ResponseReader.read`.

    Raises:
        ValueError, OSError: it cannot be read, or its tokenizer has no chat template.
    """
    tokens = Tokens(model, template_options, tags, kept)
    if name == "vllm":
        return VLLM(tokens, model, max_tokens, temperature, dtype)
    return Transformers(tokens, model, max_tokens, temperature, dtype)


class Tokens:
    """The tokenizer of a model: messages to tokens, and tokens to text."""

    def __init__(
        self,
        model: Path,
        template_options: Mapping[str, Any],
        tags: Sequence[Tags] = TAGS,
        kept: Sequence[str] = (),
    ) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self._options = template_options
        if not self.tokenizer.chat_template:
            raise ValueError(
                f"{model}: its tokenizer has no chat template, so messages cannot be put to it; "
                "save one as chat_template.jinja in this folder"
            )
        self._reader = ResponseReader(self.tokenizer, tags)
        self._kept = kept

    def prompt(self, messages: Messages, seed: int) -> Prompt:
        """Return messages in the model's chat template, up to where its answer begins."""
        asked = [dict(message) for message in messages]
        options: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False}
        options.update(self._options)
        text = self.tokenizer.apply_chat_template(asked, **options)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, ids, seed)

    def answer(self, prompt: Prompt, ids: Sequence[int], is_cut: bool) -> Answer:
        """Return generated tokens as text without special tokens, and ready for scoring."""
        response_ids = list(ids)
        text = self.tokenizer.decode(response_ids, skip_special_tokens=True)
        response = self._reader.read(prompt.ids, response_ids, kept=self._kept, decoded=text)
        return Answer(text, len(response_ids), is_cut, response)


class Transformers:
    """Generates with a transformers model, in batches of prompts of similar length."""

    def __init__(
        self, tokens: Tokens, model: Path, max_tokens: int, temperature: float, dtype: str
    ) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        device = "cpu"
        if torch.cuda.is_available():
            device = "cuda"
        self._model = loaded.to(device).eval()
        self.prompt = tokens.prompt
        self._read = tokens.answer
        self._max_tokens = max_tokens
        self.positions = int(loaded.config.get_text_config().max_position_embeddings)
        stops = end_ids(loaded.generation_config, loaded.config)
        self._pad = tokens.tokenizer.pad_token_id or 0
        self._params = SamplingParams(temperature, stop_ids=stops)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `AnswerEngine`; the longest prompts come first, so that memory is short soon."""
        for batch in batches([len(prompt.ids) for prompt in prompts], self._max_tokens):
            requests = []
            for place in batch:
                prompt = prompts[place]
                request = Request(prompt.ids, self._params, self._max_tokens, prompt.seed)
                requests.append(request)
            found = {}
            # They come in the order in which they end.
            for k, outcome in sample(self._model, requests, self._pad):
                place = batch[k]
                found[place] = self._answer(prompts[place], outcome)
            yield found

    def _answer(self, prompt: Prompt, outcome: Completion | Exception) -> Answer:
        """Return the answer of a completion; raise ValueError for what the sampler could not do."""
        if isinstance(outcome, Exception):
            raise ValueError(str(outcome))
        return self._read(prompt, outcome.token_ids, outcome.finish == "length")


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the places of prompts, the longest first, in batches of up to `BATCH_TOKENS` tokens.

    >>> list(batches([10, 30, 20], 16_000))
    [[1, 2], [0]]
    """
    order = sorted(range(len(lengths)), key=lambda k: (-lengths[k], k))
    while order:
        size = max(1, BATCH_TOKENS // (lengths[order[0]] + max_tokens))
        yield order[:size]
        order = order[size:]


class VLLM:
    """Generates with vLLM's class `LLM`, which makes batches of its own."""

    def __init__(
        self, tokens: Tokens, model: Path, max_tokens: int, temperature: float, dtype: str
    ) -> None:
        # It is not installed everywhere.
        self._vllm = importlib.import_module("vllm")
        self._llm = self._vllm.LLM(model=str(model), dtype=dtype, seed=0)
        self.prompt = tokens.prompt
        self._read = tokens.answer
        self._options = {"max_tokens": max_tokens, "temperature": temperature, "detokenize": False}
        self.positions = int(self._llm.llm_engine.model_config.max_model_len)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `AnswerEngine`."""
        asked = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]
        params = []
        for prompt in prompts:
            seed = prompt.seed % 2**31
            params.append(self._vllm.SamplingParams(seed=seed, **self._options))
        found = {}
        for k, output in enumerate(self._llm.generate(asked, params)):
            done = output.outputs[0]
            is_cut = done.finish_reason == "length"
            found[k] = self._read(prompts[k], done.token_ids, is_cut)
        yield found
