"""Sampling from a transformers model, each response from a random stream of its own.

A prompt is read once for all its responses, and once a tenth of the responses have ended they are
dropped; in transformers' own `generate` all go on until the longest has ended, which takes twice as
long and more.

Names and defaults of the options are those that verl sends to its vLLM server (verl 0.9:
verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.generate), so that a config
means the same here. An option that cannot be honoured raises instead of being ignored.

The log-probability of a token is taken under the distribution that it was drawn from: after
temperature, top-k and top-p. That is vLLM's "processed_logprobs", verl's default (verl 0.9:
RolloutConfig.logprobs_mode). With top_p=1 and top_k=-1 it equals what verl's actor recomputes
(logits / temperature), so in float32, verl's `training/rollout_probs_diff_max` measures weight
sync alone.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# vLLM samples greedily below this temperature (vllm.sampling_params._SAMPLING_EPS).
GREEDY_BELOW = 1e-5

# Not implemented, but accepted at the value that turns them off: verl always sends some of them.
_OFF_VALUES: dict[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "n": 1,
    "stop": [],
}
# "logprobs" only says whether the caller wants them back; they are always computed.
_USED = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "seed",
    "session",
    "logprobs",
)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn, and which of them end a response.

    Attributes:
        temperature: 0 means greedy (argmax); otherwise the logits are divided by it.
        top_p: probability mass to sample from; 1 is off.
        top_k: number of tokens to sample from; 0 and -1 are off.
        stop_ids: tokens that end the response; the ending token is part of the response.

    Raises:
        ValueError: a number out of range; transformers says which.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self.warpers()

    @property
    def greedy(self) -> bool:
        return 0 <= self.temperature < GREEDY_BELOW

    def warpers(self) -> transformers.LogitsProcessorList:
        """What turns logits into those that are drawn from, in vLLM's order."""
        warpers = transformers.LogitsProcessorList()
        if self.greedy:
            # The argmax survives any cut.
            return warpers
        warpers.append(transformers.TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k not in (0, -1):
            warpers.append(transformers.TopKLogitsWarper(self.top_k))
        if self.top_p != 1:
            warpers.append(transformers.TopPLogitsWarper(self.top_p))
        return warpers


def end_ids(*configs: Any) -> frozenset[int]:
    """Return the tokens that end a response, by a model's configs; ValueError without any."""
    ids: set[int] = set()
    for config in configs:
        # A token, several, or none.
        named = getattr(config, "eos_token_id", None)
        if isinstance(named, int):
            ids.add(named)
        elif named:
            ids.update(named)
    if not ids:
        raise ValueError("no eos_token_id in the model's config.json or generation_config.json")
    return frozenset(ids)


def parse_sampling_params(
    raw: Mapping[str, Any], *, eos_ids: Collection[int], ignore_eos: bool = False
) -> SamplingParams:
    """Check the names of one request's options and give the values their meaning.

    Args:
        raw: options by name; a value of None counts as not given.
        eos_ids: tokens that end a response unless `ignore_eos` is set.
        ignore_eos: the server's default, used when `raw` does not set `ignore_eos`.

    Raises:
        ValueError: an unknown or unsupported option, or a value out of range.
    """
    options = {name: value for name, value in raw.items() if value is not None}
    for name, value in options.items():
        is_off = name in _OFF_VALUES and value == _OFF_VALUES[name]
        if name not in _USED and not is_off:
            raise ValueError(
                f"sampling option {name} = {value!r} is not supported by the rollout 'hf'; it "
                f"knows {', '.join(_USED)}"
            )
    stop_ids = frozenset(options.get("stop_token_ids", ()))
    if not options.get("ignore_eos", ignore_eos):
        stop_ids |= frozenset(eos_ids)
    given = {name: options[name] for name in ("temperature", "top_p", "top_k") if name in options}
    return SamplingParams(**given, stop_ids=stop_ids)


def parse_max_tokens(raw: Mapping[str, Any], *, default: int, room: int) -> int:
    """Return the longest response in tokens, from 1 to `room`, as verl's vLLM server does.

    Args:
        raw: options by name.
        default: where `raw` names no length.
        room: what is left in the model's context, at least 1.
    """
    wanted = default
    if raw.get("max_tokens") is not None:
        wanted = raw["max_tokens"]
    elif raw.get("max_new_tokens") is not None:
        wanted = raw["max_new_tokens"]
    return max(1, min(int(wanted), room))


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


def draw(params: SamplingParams, logits_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token for each row, (B,), and its log-probability, nan where a logit is not finite.

    Args:
        uniform_B: where a row draws from its distribution, from 0 to below 1.
    """
    log_probs_BV = params.warpers()(logits_BV, logits_BV.float()).log_softmax(dim=-1)
    if params.greedy:
        tokens_B1 = log_probs_BV.argmax(dim=-1, keepdim=True)
    else:
        cdf_BV = log_probs_BV.double().exp().cumsum(dim=-1)
        # float32 times float64 stays below the total, so that no cut token is taken.
        drawn_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
        found_B1 = torch.searchsorted(cdf_BV, drawn_B1, right=True)
        # Rows of nan end up beyond the last token.
        tokens_B1 = found_B1.clamp(max=logits_BV.shape[1] - 1)
    log_probs_B1 = log_probs_BV.gather(1, tokens_B1)
    return tokens_B1.squeeze(1), log_probs_B1.squeeze(1)


@torch.no_grad()
def sample(
    model: Any,
    requests: Sequence[Request],
    pad_id: int,
    should_abort: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Completion | Exception]]:
    """Continue all prompts together, and yield the place of a request and its response as it ends.

    The `params` of all must be equal. `should_abort` is asked after every token; once true, the
    unfinished responses come as they are, with finish "aborted". For a request whose logits are not
    finite, a FloatingPointError comes; the others are not affected.
    """
    (params,) = {request.params for request in requests}
    device = model.get_input_embeddings().weight.device
    most = max(request.max_tokens for request in requests)

    # The first pass has a row for each prompt, and the later ones have one for each request.
    prompt_of_request = [tuple(request.prompt_ids) for request in requests]
    prompts = list(dict.fromkeys(prompt_of_request))
    row_of_prompt = {prompt: row for row, prompt in enumerate(prompts)}
    input_ids_BL = pad_sequence(
        [torch.tensor(prompt) for prompt in prompts],
        batch_first=True,
        padding_value=pad_id,
        padding_side="left",
    ).to(device)
    width = input_ids_BL.shape[1]

    # Positions in a prompt and its response; those of the padding are below 0.
    padding_B = torch.tensor([width - len(prompt) for prompt in prompts])
    positions_BL = (torch.arange(width + most) - padding_B[:, None]).to(device)

    uniform_RT = _uniform_numbers(requests, most).to(device)
    # A cache of the full width takes longer, as each pass attends to all of it.
    cache = transformers.DynamicCache(config=model.config)

    running = {k: Completion() for k in range(len(requests))}
    # The rows of the pass that are needed after it, and the request of each.
    kept = [row_of_prompt[prompt] for prompt in prompt_of_request]
    owners = list(running)
    for step in range(most):
        end = width + step
        new_positions_BL = positions_BL[:, end - input_ids_BL.shape[1] : end].clamp(min=0)
        out = model(
            input_ids=input_ids_BL,
            attention_mask=(positions_BL[:, :end] >= 0).long(),
            position_ids=new_positions_BL,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if out.get("past_key_values") is not cache:
            # It would go on without what it has read.
            raise NotImplementedError(f"{type(model).__name__} takes no DynamicCache")
        logits_BV = out.logits[:, -1]
        if kept != list(range(len(input_ids_BL))):
            rows = torch.tensor(kept, device=device)
            cache.reorder_cache(rows)
            positions_BL = positions_BL[rows]
            logits_BV = logits_BV[rows]

        tokens_B, log_probs_B = draw(params, logits_BV, uniform_RT[owners, step])
        for k, token, log_prob in zip(owners, tokens_B.tolist(), log_probs_B.tolist(), strict=True):
            # A response that has ended may still have a row.
            if k not in running:
                continue
            outcome = _extend(running[k], token, log_prob, requests[k])
            if outcome is not None:
                del running[k]
                yield k, outcome

        kept = [row for row, k in enumerate(owners) if k in running]
        if not kept or should_abort():
            break
        if len(kept) > 0.9 * len(owners):
            # Copying the cache would take longer than the rows that are not needed.
            kept = list(range(len(owners)))
        owners = [owners[row] for row in kept]
        input_ids_BL = tokens_B[:, None]
    yield from running.items()


def _uniform_numbers(requests: Sequence[Request], count: int) -> Tensor:
    """Return numbers from 0 to below 1, (R, count): each request has a stream of its own."""
    numbers = []
    for request in requests:
        stream = torch.Generator().manual_seed(request.seed)
        numbers.append(torch.rand(count, generator=stream))
    return torch.stack(numbers)


def _extend(
    response: Completion, token: int, log_prob: float, request: Request
) -> Completion | FloatingPointError | None:
    """Add a token, and return what the response has become, or None if it goes on."""
    response.token_ids.append(token)
    response.log_probs.append(log_prob)
    if math.isnan(log_prob):
        return FloatingPointError(
            f"the model's logits for response token {len(response.token_ids)} are not finite (nan "
            "or inf); check the weights of the last update"
        )
    if token in request.params.stop_ids:
        response.finish = "stop"
        return response
    if len(response.token_ids) == request.max_tokens:
        response.finish = "length"
        return response
    return None
