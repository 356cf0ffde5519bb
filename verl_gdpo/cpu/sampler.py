"""Sampling with transformers' `generate`, each response from a random stream of its own.

The log-probability of a token is taken under the distribution that it was drawn from: after
temperature, top-k and top-p. That is vLLM's "processed_logprobs", verl's default (verl 0.9:
RolloutConfig.logprobs_mode). With top_p=1 and top_k=-1 it equals what verl's actor recomputes
(logits / temperature), so verl's `training/rollout_probs_diff_max` measures weight sync alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

from verl_gdpo.cpu.sampling_params import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt_ids: token ids, at least one.
        params: how to sample.
        max_tokens: longest response, in tokens, at least 1.
        seed: of the random stream, below 2**64; equal seeds and equal weights give equal tokens.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    seed: int = 0


@dataclass
class Completion:
    """One response: `log_probs[i]` belongs to `token_ids[i]`; finish is stop, length or aborted."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: str = "aborted"
    global_steps: int | None = None


class OwnDraws(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Draws the next token of each row from the row's own stream, and bars all others.

    `generate` knows one random stream for a whole batch, in which what a request draws would
    depend on its neighbours.
    """

    def __init__(self, params: SamplingParams, seeds: Sequence[int], max_tokens: int) -> None:
        self._params, self._warpers = params, params.warpers()
        streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._uniform_BT = torch.stack([torch.rand(max_tokens, generator=s) for s in streams])
        #: of the tokens drawn so far, (B,) each; nan in a row whose logits are not finite
        self.log_probs_TB: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits (B, V) that leave one token a row."""
        log_probs_BV = self._warpers(input_ids, scores).log_softmax(dim=-1)
        if self._params.greedy:
            tokens_B1 = log_probs_BV.argmax(dim=-1, keepdim=True)
        else:
            uniform_B1 = self._uniform_BT[:, len(self.log_probs_TB), None]
            cdf_BV = log_probs_BV.double().exp().cumsum(dim=-1)
            # float32 times float64 stays below the total, so that no cut token is taken
            tokens_B1 = torch.searchsorted(cdf_BV, uniform_B1 * cdf_BV[:, -1:], right=True)
            tokens_B1 = tokens_B1.clamp(max=scores.shape[1] - 1)  # rows of nan end up beyond
        self.log_probs_TB.append(log_probs_BV.gather(1, tokens_B1).squeeze(1))
        return torch.full_like(scores, -torch.inf).scatter(1, tokens_B1, 0.0)


class Abort(StoppingCriteria):  # type: ignore[misc, unused-ignore]
    """Stops all rows once `should_abort` says so."""

    def __init__(self, should_abort: Callable[[], bool]) -> None:
        self._should_abort = should_abort

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), self._should_abort())


def sample(
    model: Any,
    requests: Sequence[Request],
    pad_id: int,
    should_abort: Callable[[], bool] = lambda: False,
) -> list[Completion | Exception]:
    """Continue all prompts together; their `params` must be equal.

    `should_abort` is asked after every token; once true, the unfinished responses come back as
    they are, with finish "aborted". A request whose logits are not finite comes back as a
    FloatingPointError; the others are not affected.
    """
    (params,) = {request.params for request in requests}
    prompts = [torch.tensor(request.prompt_ids) for request in requests]
    ids_BL, mask_BL = (
        pad_sequence(rows, batch_first=True, padding_value=padding, padding_side="left")
        for rows, padding in ((prompts, pad_id), ([torch.ones_like(ids) for ids in prompts], 0))
    )
    max_tokens = max(request.max_tokens for request in requests)
    draws = OwnDraws(params, [request.seed for request in requests], max_tokens)
    # the model's own one: what is None in one that is passed comes from the model's, such as eos
    model.generation_config = GenerationConfig(
        do_sample=False,  # it takes the one token that OwnDraws leaves
        max_new_tokens=max_tokens,
        eos_token_id=sorted(params.stop_ids) or None,
        pad_token_id=pad_id,
        cache_implementation="static",  # a seventh of the time less than growing one
    )
    ids_BL = model.generate(
        ids_BL,
        attention_mask=mask_BL,
        logits_processor=[draws],
        stopping_criteria=[Abort(should_abort)],
    )
    tokens_BT = ids_BL[:, mask_BL.shape[1] :].tolist()
    log_probs_BT = torch.stack(draws.log_probs_TB, dim=1).tolist()
    return list(map(_completion, requests, tokens_BT, log_probs_BT))


def _completion(
    request: Request, tokens: list[int], log_probs: list[float]
) -> Completion | FloatingPointError:
    """Cut a row of the batch, which goes on until the longest response has ended."""
    ends = (k for k, token in enumerate(tokens, 1) if token in request.params.stop_ids)
    stop = next(ends, request.max_tokens + 1)
    length = min(stop, request.max_tokens, len(tokens))
    for k, log_prob in enumerate(log_probs[:length], 1):
        if log_prob != log_prob:
            return FloatingPointError(
                f"the model's logits for response token {k} are not finite (nan or inf); check "
                "the weights of the last update"
            )
    finish = "stop" if length == stop else "length" if length == request.max_tokens else "aborted"
    return Completion(tokens[:length], log_probs[:length], finish)
