"""The no-GPU rollout engine: a transformers model that is fed weights and asked for tokens.

Knows neither Ray nor verl; `rollout.py` connects it to them.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_gdpo.cpu.batcher import Batcher
from verl_gdpo.cpu.sampler import (
    Completion,
    Request,
    parse_max_tokens,
    parse_sampling_params,
    sample,
)


class Engine:
    """Generates with `model`, whose weights come from `load_weights`.

    Args:
        model: a transformers causal language model in float32; its present weights are not used.
        eos_ids: tokens that end a response.
        pad_id: any token id; padding is masked out.
        prompt_length: verl's `rollout.prompt_length`, in tokens.
        response_length: verl's `rollout.response_length`, in tokens.
        max_model_len: longest prompt plus response that the model can hold, in tokens.
        max_batch: most requests per batch.
        seed: seed of all sampling that does not bring its own.
        ignore_eos: whether responses run on past `eos_ids` by default.

    Sampling is reproducible: under the weights of one step, the k-th request of a session for a
    prompt draws from a random stream made of (seed, step, session, k, prompt), in whatever order
    requests arrive. `batcher` can abort and resume them.
    """

    def __init__(
        self,
        model: Any,
        *,
        eos_ids: Collection[int],
        pad_id: int,
        prompt_length: int,
        response_length: int,
        max_model_len: int,
        max_batch: int,
        seed: int = 0,
        ignore_eos: bool = False,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed: got {seed}, expected at least 0")
        self.model = model.float().eval()
        self.global_steps: int | None = None
        self._eos_ids = frozenset(eos_ids)
        self._prompt_length, self._response_length = prompt_length, response_length
        self._max_model_len, self._seed, self._ignore_eos = max_model_len, seed, ignore_eos
        self._vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self._syncs = 0
        self._seen: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._pad_id = pad_id
        self.batcher = Batcher(self._run, max_batch=max_batch)

    async def load_weights(
        self, state: Mapping[str, torch.Tensor], global_steps: int | None = None
    ) -> None:
        """Replace all weights, between batches.

        Raises:
            ValueError, RuntimeError: a parameter is missing, unknown or of another shape; the
                engine then refuses to generate until a complete set of weights has arrived.
        """
        async with self.batcher.idle:
            synced, self._syncs = self._syncs, 0
            load_full_state(self.model, state)
            self._syncs = synced + 1
            self.global_steps = global_steps if global_steps is not None else self.global_steps
            self._seen.clear()

    async def generate(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> Completion:
        """Continue one prompt.

        Raises:
            RuntimeError: no weights yet, or the batch failed.
            ValueError: an empty, too long or out-of-vocabulary prompt, or a bad sampling option.
            FloatingPointError: the logits of this request are not finite.
        """
        if not self._syncs:
            raise RuntimeError(
                "the rollout was asked to generate before a complete set of weights was loaded; "
                "verl's trainer must call update_weights first"
            )
        prompt = tuple(int(token) for token in prompt_ids)
        self._check_prompt(prompt)
        params = parse_sampling_params(
            sampling_params, eos_ids=self._eos_ids, ignore_eos=self._ignore_eos
        )
        max_tokens = parse_max_tokens(
            sampling_params,
            default=min(
                self._response_length, self._prompt_length + self._response_length - len(prompt)
            ),
            room=self._max_model_len - len(prompt),
        )
        seed = self._seed_of(prompt, sampling_params)
        return await self.batcher.submit(Request(prompt, params, max_tokens, seed))

    def _seed_of(self, prompt: tuple[int, ...], options: Mapping[str, Any]) -> int:
        """The request's own seed, or one made of the server's and of what is asked for."""
        if options.get("seed") is not None:
            entropy: tuple[int, ...] = (options["seed"],)
        else:
            step = self._syncs if self.global_steps is None else self.global_steps
            session = options.get("session", 0)
            entropy = (self._seed, step, session, self._seen[session, prompt], *prompt)
            self._seen[session, prompt] += 1
        return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])

    def _run(
        self, requests: Sequence[Request], should_abort: Callable[[], bool]
    ) -> list[Completion | Exception]:
        """Sample those with equal options together."""
        outcomes: list[Completion | Exception] = [Completion() for _ in requests]
        for params in {request.params for request in requests}:
            places = [k for k, request in enumerate(requests) if request.params == params]
            alike = [requests[k] for k in places]
            sampled = sample(self.model, alike, self._pad_id, should_abort)
            for k, outcome in zip(places, sampled, strict=True):
                outcomes[k] = outcome
        for outcome in outcomes:
            if isinstance(outcome, Completion):
                outcome.global_steps = self.global_steps
        return outcomes

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty; expected at least one token id")
        if len(prompt) >= self._max_model_len:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and leaves no room for a response within "
                f"the model's {self._max_model_len}; shorten it or raise rollout.max_model_len"
            )
        bad = [token for token in prompt if not 0 <= token < self._vocab_size]
        if bad:
            raise ValueError(
                f"prompt token ids {bad[:3]} are outside the model's vocabulary of "
                f"{self._vocab_size}; check that tokenizer and model belong together"
            )


def load_full_state(model: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copy `state` into `model`; a tied parameter has to be given under one of its names only.

    Raises:
        ValueError: a parameter is missing or unknown.
        RuntimeError: a parameter has another shape.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    given = {id(own[name]) for name in state if name in own}
    result = model.load_state_dict(state, strict=False)
    missing = [name for name in result.missing_keys if name in own and id(own[name]) not in given]
    if missing or result.unexpected_keys:
        raise ValueError(
            f"the weights do not fit {type(model).__name__}: missing {len(missing)}, e.g. "
            f"{missing[:3]}; unknown {len(result.unexpected_keys)}, e.g. "
            f"{result.unexpected_keys[:3]}"
        )
