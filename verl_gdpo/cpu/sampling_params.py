"""The sampling options that the transformers rollout understands; every other one is refused.

Names and defaults are those that verl sends to its vLLM server (verl 0.9:
verl.workers.rollout.vllm_rollout.vllm_async_server.vLLMHttpServer.generate), so that a config
means the same here. An option that cannot be honoured raises instead of being ignored.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# vLLM samples greedily below this temperature (vllm.sampling_params._SAMPLING_EPS).
GREEDY_BELOW = 1e-5

# "logprobs" only says whether the caller wants them back; they are always computed.
_USED = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "max_new_tokens",
        "logprobs",
        "stop_token_ids",
        "ignore_eos",
        "seed",
    }
)
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


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    Attributes:
        temperature: 0 means greedy (argmax); otherwise the logits are divided by it.
        top_p: probability mass to sample from, in (0, 1]; 1 is off.
        top_k: number of tokens to sample from; 0 is off.
        max_tokens: longest response, in tokens, at least 1.
        stop_ids: tokens that end the response; the ending token is part of the response.
        seed: seed of this one response, or None for the server's own choice.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1
    stop_ids: frozenset[int] = frozenset()
    seed: int | None = None


def parse_sampling_params(
    raw: Mapping[str, Any],
    *,
    default_max_tokens: int,
    max_possible_tokens: int,
    eos_ids: Collection[int],
    ignore_eos: bool = False,
) -> SamplingParams:
    """Check one request's sampling options and give them their meaning.

    Args:
        raw: options by name; a value of None counts as not given.
        default_max_tokens: response length when `raw` names none, in tokens.
        max_possible_tokens: room left in the model's context, in tokens, at least 1. Lengths
            are clamped to [1, max_possible_tokens], as verl's vLLM server does.
        eos_ids: tokens that end a response unless `ignore_eos` is set.
        ignore_eos: the server's default, used when `raw` does not set `ignore_eos`.

    Raises:
        ValueError: an unknown or unsupported option, or a value out of range.
    """
    given = {name: value for name, value in raw.items() if value is not None}
    _refuse_unsupported(given)
    temperature = _number(given, "temperature", 1.0, low=0.0)
    top_p = _number(given, "top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise ValueError("sampling option top_p: got 0.0, expected a number in (0, 1]")
    top_k = max(0, _integer(given, "top_k", -1, low=-1))  # vLLM: -1 and 0 both mean "all"
    if temperature < GREEDY_BELOW:
        temperature, top_p, top_k = 0.0, 1.0, 0  # argmax survives any truncation
    stop_ids = frozenset(_token_ids(given.get("stop_token_ids", ())))
    if not given.get("ignore_eos", ignore_eos):
        stop_ids |= frozenset(eos_ids)
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max(1, min(_max_tokens(given, default_max_tokens), max_possible_tokens)),
        stop_ids=stop_ids,
        seed=_integer(given, "seed", 0, low=0) if "seed" in given else None,
    )


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _USED:
            continue
        if name not in _OFF_VALUES:
            raise ValueError(
                f"sampling option {name!r} (= {value!r}) is not supported by the rollout 'hf'; "
                f"it knows {', '.join(sorted(_USED))}"
            )
        off = _OFF_VALUES[name]
        if value != off and not (name == "stop" and not value):
            raise ValueError(
                f"sampling option {name} = {value!r} is not supported by the rollout 'hf'; "
                f"leave it out or set it to {off!r}"
            )


def _max_tokens(given: Mapping[str, Any], default: int) -> int:
    if "max_tokens" in given and "max_new_tokens" in given:
        raise ValueError("sampling options max_tokens and max_new_tokens are both set; keep one")
    name = "max_tokens" if "max_tokens" in given else "max_new_tokens"
    return _integer(given, name, default)


def _number(
    given: Mapping[str, Any], name: str, default: float, *, low: float, high: float = math.inf
) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"sampling option {name}: got {value!r}, expected a number")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(
            f"sampling option {name}: got {value!r}, expected a finite number in [{low}, {high}]"
        )
    return float(value)


def _integer(given: Mapping[str, Any], name: str, default: int, *, low: int | None = None) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"sampling option {name}: got {value!r}, expected an integer")
    if low is not None and value < low:
        raise ValueError(f"sampling option {name}: got {value}, expected at least {low}")
    return value


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list | tuple | set | frozenset) or not all(
        isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in value
    ):
        raise ValueError(
            f"sampling option stop_token_ids: got {value!r}, expected a list of token ids"
        )
    return list(value)
