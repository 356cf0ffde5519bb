"""Generates answers with a transformers model; has the tokenizer that both engines use."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_gdpo.cpu.sampler import Completion, Request, SamplingParams, sample
from verl_gdpo.evaluation.engines import Prompt, Sampling, has_gpu
from verl_gdpo.evaluation.questions import Answer, Messages

BATCH_TOKENS = 32_768  # that a batch may hold: its prompts and their answers


@dataclass
class Tokens:
    """The tokenizer of a model: messages to tokens, and tokens to text.

    template_options: keywords for the chat template, such as `enable_thinking`.
    """

    tokenizer: Any
    template_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Path, template_options: Mapping[str, Any]) -> "Tokens":
        """Read the tokenizer of a Hugging Face folder; raise ValueError if it has no template."""
        tokenizer = AutoTokenizer.from_pretrained(model)
        if not tokenizer.chat_template:
            raise ValueError(
                f"{model}: its tokenizer has no chat template, so messages cannot be put to it; "
                "save one as chat_template.jinja in this folder"
            )
        return cls(tokenizer, template_options)

    def prompt(self, messages: Messages, seed: int) -> Prompt:
        """Return messages in the model's chat template, up to where its answer begins."""
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=True,
            tokenize=False,
            **self.template_options,
        )
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return Prompt(text, ids, seed)

    def answer(self, ids: Sequence[int], is_cut: bool) -> Answer:
        """Return generated tokens as text without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return Answer(text, len(ids), is_cut)


class Transformers:
    """Generates with a transformers model, in batches of prompts of similar length."""

    def __init__(
        self, model: Path, template_options: Mapping[str, Any], sampling: Sampling, dtype: str
    ) -> None:
        tokens = Tokens.of(model, template_options)
        place = "cuda" if has_gpu() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = loaded.to(place).eval()
        self.prompt, self._read = tokens.prompt, tokens.answer
        self._max_tokens = sampling.max_tokens
        self.positions = int(loaded.config.get_text_config().max_position_embeddings)
        self._stops = _ids(loaded.generation_config.eos_token_id) | _ids(loaded.config.eos_token_id)
        if not self._stops:
            raise ValueError(f"{model}: no eos_token_id in config.json or generation_config.json")
        self._pad = tokens.tokenizer.pad_token_id or 0
        self._params = SamplingParams(
            sampling.temperature, sampling.top_p, sampling.top_k, frozenset(self._stops)
        )

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `AnswerEngine`; the longest prompts come first, so that memory is short at once."""
        for batch in batches([len(prompt.ids) for prompt in prompts], self._max_tokens):
            requests = [
                Request(prompts[k].ids, self._params, self._max_tokens, prompts[k].seed)
                for k in batch
            ]
            done = sample(self._model, requests, self._pad)
            yield dict(zip(batch, map(self._answer, requests, done), strict=True))

    def _answer(self, request: Request, outcome: Completion | Exception) -> Answer:
        if isinstance(outcome, Exception):
            raise ValueError(f"a prompt of {len(request.prompt_ids)} tokens: {outcome}")
        return self._read(outcome.token_ids, outcome.finish == "length")


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


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else {*value}
