"""Chooses what generates answers: vLLM where it is installed beside a GPU, else transformers.

Both get token ids, and give back texts without special tokens. A sample is drawn from a random
stream of its own, which its question, its number and its turn determine.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_gdpo.evaluation.questions import Answer, Messages

# {engine: the module and the class}; a module imports its engine
ENGINES = {
    "vllm": ("verl_gdpo.evaluation.vllm_engine", "VLLM"),
    "transformers": ("verl_gdpo.evaluation.transformers_engine", "Transformers"),
}


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


class AnswerEngine(Protocol):
    """A model that answers.

    positions: the longest prompt plus answer that the model can hold, in tokens.
    """

    positions: int

    def prompt(self, messages: Messages, seed: int) -> Prompt:
        """Return messages as the model reads them."""

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """Yield {place of a prompt: its answer} for each batch, in any order."""


def has_gpu() -> bool:
    """Whether torch sees a GPU."""
    import torch  # takes seconds, which `--help` and `--compare` need not wait

    return bool(torch.cuda.is_available())


def choose_engine(wanted: str | None) -> str:
    """Return the engine that this machine has; raise ValueError if the wanted one is not here."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    if wanted == "vllm" and not has_vllm:
        raise ValueError("--engine vllm: vLLM is not installed here; --engine transformers")
    return wanted or ("vllm" if has_vllm and has_gpu() else "transformers")


def load_engine(
    name: str, model: Path, template_options: Mapping[str, Any], sampling: Sampling, dtype: str
) -> AnswerEngine:
    """Load a model.

    Args:
        template_options: keywords for the chat template, such as `enable_thinking`.

    Raises:
        ValueError, OSError: it cannot be read, or its tokenizer has no chat template.
    """
    module, kind = ENGINES[name]
    engine: AnswerEngine = getattr(importlib.import_module(module), kind)(
        model, template_options, sampling, dtype
    )
    return engine
