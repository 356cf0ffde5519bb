"""Generates answers: with vLLM where it is installed beside a GPU, else with transformers.

Both get token ids, and give back texts without special tokens. A sample is drawn from a random
stream of its own, which its question, its number and its turn determine.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from verl_gdpo.evaluation.questions import Answer, Messages

if TYPE_CHECKING:
    from verl_gdpo.cpu.sampler import Completion, Request

ENGINES = ("vllm", "transformers")
BATCH_TOKENS = 32_768  # that a batch of transformers may hold: its prompts and their answers
VLLM_BATCH = 512  # answers that vLLM gives back together; what is not given back is lost by a kill


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; a temperature of 0 is greedy.

    max_tokens: the limit of an answer.
    top_k: -1 is off.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Prompt:
    """What the model reads: the text of a chat template, and its tokens."""

    text: str
    ids: Sequence[int]
    seed: int = 0


class Engine(Protocol):
    """A model that answers.

    positions: the longest prompt plus answer that the model can hold, in tokens.
    """

    positions: int

    def prompt(self, messages: Messages, seed: int) -> Prompt:
        """Return messages as the model reads them."""

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """Yield {place of a prompt: its answer} for each batch, in any order."""


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
        from transformers import AutoTokenizer

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

    def __init__(self, model: Path, tokens: Tokens, sampling: Sampling, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from verl_gdpo.cpu.sampler import SamplingParams

        place = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        self._model = loaded.to(place).eval()
        self.prompt, self._read, self._max_tokens = (
            tokens.prompt,
            tokens.answer,
            sampling.max_tokens,
        )
        self.positions = int(loaded.config.get_text_config().max_position_embeddings)
        self._stops = _ids(loaded.generation_config.eos_token_id) | _ids(loaded.config.eos_token_id)
        if not self._stops:
            raise ValueError(f"{model}: no eos_token_id in config.json or generation_config.json")
        self._pad = tokens.tokenizer.pad_token_id or 0
        self._params = SamplingParams(
            sampling.temperature, sampling.top_p, sampling.top_k, frozenset(self._stops)
        )

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `Engine`; the longest prompts come first, so that memory is short at once."""
        from verl_gdpo.cpu.sampler import Request, sample

        for batch in batches([len(prompt.ids) for prompt in prompts], self._max_tokens):
            requests = [
                Request(prompts[k].ids, self._params, self._max_tokens, prompts[k].seed)
                for k in batch
            ]
            done = sample(self._model, requests, self._pad)
            yield dict(zip(batch, map(self._answer, requests, done), strict=True))

    def _answer(self, request: "Request", outcome: "Completion | Exception") -> Answer:
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


class VLLM:
    """Generates with vLLM's class `LLM`. Relies on vLLM 0.24: `LLM`, `SamplingParams`."""

    def __init__(self, model: Path, tokens: Tokens, sampling: Sampling, dtype: str) -> None:
        from vllm import LLM

        self._llm = LLM(model=str(model), dtype=dtype, seed=0)
        self.prompt, self._read, self._sampling = tokens.prompt, tokens.answer, sampling
        self.positions = int(self._llm.llm_engine.model_config.max_model_len)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `Engine`."""
        for first in range(0, len(prompts), VLLM_BATCH):
            batch = prompts[first : first + VLLM_BATCH]
            outputs = self._llm.generate(
                [{"prompt_token_ids": list(prompt.ids)} for prompt in batch],
                [self._params(prompt.seed) for prompt in batch],
                use_tqdm=False,
            )
            yield dict(enumerate(map(self._answer, outputs), first))

    def _answer(self, output: Any) -> Answer:
        (one,) = output.outputs
        return self._read(one.token_ids, one.finish_reason == "length")

    def _params(self, seed: int) -> Any:
        from vllm import SamplingParams

        chosen = self._sampling
        return SamplingParams(
            n=1,
            max_tokens=chosen.max_tokens,
            temperature=chosen.temperature,
            top_p=chosen.top_p,
            top_k=chosen.top_k,
            seed=seed % 2**31,
            detokenize=False,
        )


def choose_engine(wanted: str | None) -> str:
    """Return the engine that this machine has; raise ValueError if the wanted one is not here."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not has_vllm:
        raise ValueError("--engine vllm: vLLM is not installed here; --engine transformers")
    if wanted:
        return wanted
    import torch

    return "vllm" if has_vllm and torch.cuda.is_available() else "transformers"


def load_engine(name: str, model: Path, tokens: Tokens, sampling: Sampling, dtype: str) -> Engine:
    """Load a model; raise ValueError or OSError if it cannot be read."""
    kind: type[VLLM] | type[Transformers] = VLLM if name == "vllm" else Transformers
    return kind(model, tokens, sampling, dtype)


def _ids(value: int | list[int] | None) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else {*value}
