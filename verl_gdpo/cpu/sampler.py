"""Batched sampling with a transformers causal language model and a KV cache, on the CPU.

The log-probability of a token is taken under the distribution that it was drawn from: after
temperature, top-k and top-p. That is vLLM's "processed_logprobs", verl's default (verl 0.9:
RolloutConfig.logprobs_mode). With top_p=1 and top_k=-1 it equals what verl's actor recomputes
(logits / temperature), so verl's `training/rollout_probs_diff_max` measures weight sync alone.

Every response has its own stream of random numbers, so that what a request draws depends on its
seed and its logits, not on its neighbours in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_gdpo.cpu.sampling_params import SamplingParams

_RUNNING, _STOPPED, _FULL, _BROKEN = range(4)
_FINISH_NAMES = {_RUNNING: "aborted", _STOPPED: "stop", _FULL: "length"}


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt_ids: token ids, at least one.
        params: how to sample.
        entropy: non-negative integers that seed the random stream; equal entropy and equal
            weights give equal tokens.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    entropy: tuple[int, ...] = (0,)


@dataclass
class Completion:
    """One response: `log_probs[i]` belongs to `token_ids[i]`; finish is stop, length or aborted."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: str = "aborted"
    global_steps: int | None = None


class Sampler:
    """Samples from `model`, many prompts at a time."""

    def __init__(self, model: Any, pad_id: int) -> None:
        self.model = model
        self.pad_id = pad_id

    def generate(
        self, requests: Sequence[Request], should_abort: Callable[[], bool] = lambda: False
    ) -> list[Completion | Exception]:
        """Continue all prompts together, one token per step, dropping rows that are done.

        `should_abort` is asked before every step; once true, the unfinished responses come back
        as they are, with finish "aborted". A request whose logits are not finite comes back as a
        FloatingPointError; the others are not affected.
        """
        if not requests:
            return []
        with torch.inference_mode():
            rows = _Rows(requests)
            ids_AL, mask_AL, positions_AL = left_pad([r.prompt_ids for r in requests], self.pad_id)
            cache = None
            for step in range(max(r.params.max_tokens for r in requests)):
                if should_abort():
                    break
                out = self.model(
                    input_ids=ids_AL,
                    attention_mask=mask_AL,
                    position_ids=positions_AL,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                cache = out.past_key_values
                tokens_A, going_A = rows.step(step, out.logits[:, -1])
                if not going_A.any():
                    break
                if not going_A.all():
                    kept = going_A.nonzero().squeeze(1)
                    cache.batch_select_indices(kept)
                    tokens_A, mask_AL = tokens_A[kept], mask_AL[kept]
                    positions_AL = positions_AL[kept]
                ids_AL, positions_AL = tokens_A[:, None], positions_AL[:, -1:] + 1
                mask_AL = torch.cat([mask_AL, torch.ones_like(ids_AL)], dim=1)
            return rows.completions()


class _Rows:
    """Book-keeping of a batch: B requests in all, of which A are still going."""

    def __init__(self, requests: Sequence[Request]) -> None:
        params = [r.params for r in requests]
        count, width = len(params), max(p.max_tokens for p in params)
        stop_width = max(1, *(len(p.stop_ids) for p in params))
        self.alive_A = torch.arange(count)
        self.temperature_B = torch.tensor([p.temperature for p in params])
        self.top_p_B = torch.tensor([p.top_p for p in params], dtype=torch.float64)
        self.top_k_B = torch.tensor([p.top_k for p in params])
        self.max_tokens_B = torch.tensor([p.max_tokens for p in params])
        self.stop_BS = torch.tensor(  # -1 is no token
            [[*p.stop_ids] + [-1] * (stop_width - len(p.stop_ids)) for p in params]
        )
        uniforms_BT = np.zeros((count, width))
        for row, request in zip(uniforms_BT, requests, strict=True):
            length = request.params.max_tokens
            row[:length] = np.random.default_rng(list(request.entropy)).random(length)
        self.uniforms_BT = torch.from_numpy(uniforms_BT)
        self.tokens_BT = torch.zeros((count, width), dtype=torch.long)
        self.log_probs_BT = torch.zeros((count, width))
        self.length_B = torch.zeros(count, dtype=torch.long)
        self.finish_B = torch.full((count,), _RUNNING)

    def step(self, step: int, logits_AV: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token for each going row; returns the tokens and which rows go on, both (A,)."""
        alive_A = self.alive_A
        tokens_A, log_probs_A = draw(
            logits_AV.float(),
            self.temperature_B[alive_A],
            self.top_k_B[alive_A],
            self.top_p_B[alive_A],
            self.uniforms_BT[alive_A, step],
        )
        finish_A = torch.full_like(alive_A, _RUNNING)
        finish_A[self.max_tokens_B[alive_A] == step + 1] = _FULL
        finish_A[(tokens_A[:, None] == self.stop_BS[alive_A]).any(dim=1)] = _STOPPED
        finish_A[log_probs_A.isnan()] = _BROKEN
        self.tokens_BT[alive_A, step] = tokens_A
        self.log_probs_BT[alive_A, step] = log_probs_A
        self.length_B[alive_A] = step + 1
        self.finish_B[alive_A] = finish_A
        going_A = finish_A == _RUNNING
        self.alive_A = alive_A[going_A]
        return tokens_A, going_A

    def completions(self) -> list[Completion | Exception]:
        out: list[Completion | Exception] = []
        for tokens, log_probs, length, finish in zip(
            self.tokens_BT.tolist(),
            self.log_probs_BT.tolist(),
            self.length_B.tolist(),
            self.finish_B.tolist(),
            strict=True,
        ):
            if finish == _BROKEN:
                out.append(
                    FloatingPointError(
                        f"the model's logits for response token {length} are not finite (nan or "
                        "inf); check the weights of the last update"
                    )
                )
            else:
                out.append(Completion(tokens[:length], log_probs[:length], _FINISH_NAMES[finish]))
        return out


def left_pad(prompts: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """Right-align prompts; returns ids, attention mask and position ids, each (B, L) int64."""
    width = max(len(p) for p in prompts)
    ids_BL = torch.tensor([[pad_id] * (width - len(p)) + list(p) for p in prompts])
    lengths_B1 = torch.tensor([[len(p)] for p in prompts])
    mask_BL = (torch.arange(width) >= width - lengths_B1).long()
    return ids_BL, mask_BL, (mask_BL.cumsum(dim=1) - 1).clamp(min=0)


def draw(
    logits_AV: Tensor, temperature_A: Tensor, top_k_A: Tensor, top_p_A: Tensor, uniform_A: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting its cumulative distribution at `uniform_A`, in [0, 1).

    Rows at temperature 0 take the argmax, with log-probabilities of the undivided logits, as in
    vLLM. Returns tokens (A,) int64 and their log-probabilities (A,) float32; a row whose logits
    are not finite has log-probability nan.
    """
    greedy_A = temperature_A == 0
    logits_AV = logits_AV / torch.where(greedy_A, 1.0, temperature_A)[:, None]
    if bool((top_k_A > 0).any() or (top_p_A < 1).any()):
        logits_AV = truncate(logits_AV, top_k_A, top_p_A)
    log_probs_AV = logits_AV.log_softmax(dim=-1)
    cdf_AV = log_probs_AV.double().exp().cumsum(dim=-1)  # float32 would starve a large vocabulary
    total_A1 = cdf_AV[:, -1:]
    # Strictly below the total: a product rounded up to it would point past the last token.
    target_A1 = torch.minimum(uniform_A[:, None] * total_A1, total_A1.nextafter(total_A1 * 0))
    sampled_A = torch.searchsorted(cdf_AV, target_A1, right=True).squeeze(1)
    tokens_A = torch.where(greedy_A, logits_AV.argmax(dim=-1), sampled_A)
    tokens_A = tokens_A.clamp(max=logits_AV.shape[-1] - 1)  # only rows of nan end up beyond
    return tokens_A, log_probs_AV.gather(1, tokens_A[:, None]).squeeze(1)


def truncate(logits_AV: Tensor, top_k_A: Tensor, top_p_A: Tensor) -> Tensor:
    """Set logits outside top-k, then outside top-p of what is left, to -inf, as vLLM does.

    Top-p keeps the fewest most likely tokens whose mass reaches `top_p_A`, at least one. Tokens
    with equal logits are ranked by id. `top_k_A` = 0 and `top_p_A` = 1 switch a cut off.
    """
    sorted_AV, order_AV = logits_AV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_AV.shape[-1])
    keep_AV = (rank_V < top_k_A[:, None]) | (top_k_A == 0)[:, None]
    probs_AV = sorted_AV.double().masked_fill(~keep_AV, -torch.inf).softmax(dim=-1)
    mass_before_AV = probs_AV.cumsum(dim=-1) - probs_AV
    keep_AV &= (mass_before_AV < top_p_A[:, None]) | (top_p_A == 1)[:, None]
    cut_AV = sorted_AV.masked_fill(~keep_AV, -torch.inf)
    return torch.empty_like(logits_AV).scatter(1, order_AV, cut_AV)
