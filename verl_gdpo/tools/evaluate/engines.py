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

BATCH_TOKENS = 32_768  # that a batch of transformers may hold: its prompts and their answers


def choose_engine(wanted: str | None) -> str:
    """Return the engine that this machine has; raise ValueError if the wanted one is not here."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not has_vllm:
        raise ValueError("--engine vllm: vLLM is not installed here; --engine transformers")
    return wanted or ("vllm" if has_vllm and torch.cuda.is_available() else "transformers")


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
    kind = VLLM if name == "vllm" else Transformers
    return kind(tokens, model, max_tokens, temperature, dtype)


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
        options = {"add_generation_prompt": True, "tokenize": False, **self._options}
        text = self.tokenizer.apply_chat_template(asked, **options)
        return Prompt(text, self.tokenizer(text, add_special_tokens=False)["input_ids"], seed)

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
        options = {"dtype": getattr(torch, dtype), "attn_implementation": "sdpa"}
        loaded = AutoModelForCausalLM.from_pretrained(model, **options)
        self._model = loaded.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.prompt, self._read, self._max_tokens = tokens.prompt, tokens.answer, max_tokens
        self.positions = int(loaded.config.get_text_config().max_position_embeddings)
        stops = end_ids(loaded.generation_config, loaded.config)
        self._pad = tokens.tokenizer.pad_token_id or 0
        self._params = SamplingParams(temperature, stop_ids=stops)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `AnswerEngine`; the longest prompts come first, so that memory is short soon."""
        for batch in batches([len(prompt.ids) for prompt in prompts], self._max_tokens):
            asked = [prompts[k] for k in batch]
            requests = [Request(p.ids, self._params, self._max_tokens, p.seed) for p in asked]
            done = sample(self._model, requests, self._pad)
            yield {batch[k]: self._answer(asked[k], outcome) for k, outcome in done}

    def _answer(self, prompt: Prompt, outcome: Completion | Exception) -> Answer:
        if isinstance(outcome, Exception):
            raise ValueError(str(outcome))
        return self._read(prompt, outcome.token_ids, outcome.finish == "length")


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the places of prompts, the longest first, in batches of up to `BATCH_TOKENS` tokens.

    >>> [*batches([10, 30, 20], 16_000)]
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
        self._vllm = importlib.import_module("vllm")  # not everywhere
        self._llm = self._vllm.LLM(model=str(model), dtype=dtype, seed=0)
        self.prompt, self._read = tokens.prompt, tokens.answer
        self._options = {"max_tokens": max_tokens, "temperature": temperature, "detokenize": False}
        self.positions = int(self._llm.llm_engine.model_config.max_model_len)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `AnswerEngine`."""
        asked = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]
        params = [
            self._vllm.SamplingParams(seed=prompt.seed % 2**31, **self._options)
            for prompt in prompts
        ]
        found = {}
        for k, output in enumerate(self._llm.generate(asked, params)):
            done = output.outputs[0]
            is_cut = done.finish_reason == "length"
            found[k] = self._read(prompts[k], done.token_ids, is_cut)
        yield found
