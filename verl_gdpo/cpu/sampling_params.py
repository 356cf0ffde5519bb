"""The sampling options that the transformers rollout understands; every other one is refused.

Names and defaults are those that verl sends to its vLLM server (verl 0.9:
verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.generate), so that a config
means the same here. An option that cannot be honoured raises instead of being ignored.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# vLLM samples greedily below this temperature (vllm.sampling_params._SAMPLING_EPS).
GREEDY_BELOW = 1e-5

# Not implemented, but accepted at the value that turns them off: verl always sends some of them.
_OFF_VALUES: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "min_tokens": 0,
    "n": 1,
    "stop": [],
}
# "logprobs" only says whether the caller wants them back; they are always computed.
_USED = (
    *("temperature", "top_p", "top_k", "max_tokens", "max_new_tokens", "stop_token_ids"),
    *("ignore_eos", "seed", "session", "logprobs"),
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

    def warpers(self) -> LogitsProcessorList:
        """What turns logits into those that are drawn from, in vLLM's order."""
        warpers = LogitsProcessorList()
        if self.greedy:  # the argmax survives any cut
            return warpers
        warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k not in (0, -1):
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p != 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


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
    given = {name: value for name, value in raw.items() if value is not None}
    for name, value in given.items():
        if name not in _USED and name not in _OFF_VALUES:
            raise ValueError(
                f"sampling option {name!r} (= {value!r}) is not supported by the rollout 'hf'; "
                f"it knows {', '.join(_USED)}"
            )
        if name in _OFF_VALUES and value != _OFF_VALUES[name]:
            raise ValueError(
                f"sampling option {name} = {value!r} is not supported by the rollout 'hf'; "
                f"leave it out or set it to {_OFF_VALUES[name]!r}"
            )
    stop_ids = frozenset(given.get("stop_token_ids", ()))
    if not given.get("ignore_eos", ignore_eos):
        stop_ids |= frozenset(eos_ids)
    cuts = {name: given[name] for name in ("temperature", "top_p", "top_k") if name in given}
    return SamplingParams(**cuts, stop_ids=stop_ids)


def parse_max_tokens(raw: Mapping[str, Any], *, default: int, room: int) -> int:
    """Return the longest response in tokens, from 1 to `room`, as verl's vLLM server does.

    Args:
        raw: options by name.
        default: where `raw` names no length.
        room: what is left in the model's context, at least 1.

    Raises:
        ValueError: both names of the option are set.
    """
    wanted = [raw[name] for name in ("max_tokens", "max_new_tokens") if raw.get(name) is not None]
    if len(wanted) > 1:
        raise ValueError("sampling options max_tokens and max_new_tokens are both set; keep one")
    return max(1, min(int((*wanted, default)[0]), room))
