"""Generates answers with vLLM. It relies on vLLM 0.24: `LLM`, `SamplingParams`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from verl_gdpo.evaluation.engines import Prompt, Sampling
from verl_gdpo.evaluation.questions import Answer
from verl_gdpo.evaluation.transformers_engine import Tokens

VLLM_BATCH = 512  # answers that vLLM gives back together; what is not given back is lost by a kill


class VLLM:
    """Generates with vLLM's class `LLM`."""

    def __init__(
        self, model: Path, template_options: Mapping[str, Any], sampling: Sampling, dtype: str
    ) -> None:
        tokens = Tokens.of(model, template_options)
        self._llm = LLM(model=str(model), dtype=dtype, seed=0)
        self.prompt, self._read, self._sampling = tokens.prompt, tokens.answer, sampling
        self.positions = int(self._llm.llm_engine.model_config.max_model_len)

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[dict[int, Answer]]:
        """See `AnswerEngine`."""
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
