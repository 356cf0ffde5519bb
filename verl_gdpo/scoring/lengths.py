"""Rewards of length and time, for the list `reward.reward_functions`; none of them is negative.

    +reward.reward_functions.short.path=pkg://verl_gdpo.scoring.lengths
    +reward.reward_functions.short.name=smooth +reward.reward_functions.short.limit=400

Lengths are tokens that the policy wrote itself, so that a call of a tool costs nothing but its own;
`overlong` alone counts the whole response. Times are the seconds that a rollout waited for its
tools. Where only a right answer should be short, give the reward a condition on another one, as any
other (`algorithm.gdpo.rewards.NAME.when`).
"""

import math
from collections.abc import Mapping
from typing import Any

# verl's `extra_info`, with what our reward manager adds.
Info = Mapping[str, Any]


def at_most(extra_info: Info, limit: float) -> float:
    """Return 1 up to `limit` tokens of the policy's own, else 0."""
    return float(extra_info["generated_tokens"] <= limit)


def smooth(extra_info: Info, limit: float, width: float = 50.0) -> float:
    """Return 1 / (1 + exp((tokens - limit) / width)): near 1 below the limit, 1/2 at it.

    >>> [round(smooth({"generated_tokens": n}, limit=400), 3) for n in (300, 400, 500)]
    [0.881, 0.5, 0.119]
    """
    over = (extra_info["generated_tokens"] - limit) / width
    # math.exp raises OverflowError above 709.
    return 1.0 / (1.0 + math.exp(min(over, 700.0)))


def overlong(extra_info: Info, limit: float, buffer: float) -> float:
    """Return 1 up to `limit - buffer` tokens, and less by equal steps until 0 at `limit`.

    It is 1 plus DAPO's penalty, so that no reward is negative; under a group's mean both are equal.
    As in verl, it counts the whole response, with the tokens of tools: these too use up what
    `data.max_response_length` allows.
    Source: arXiv 2503.14476, equation 13.

    >>> [overlong({"response_tokens": n}, limit=400, buffer=100) for n in (300, 350, 400, 500)]
    [1.0, 0.5, 0.0, 0.0]
    """
    # It is linear within the buffer, and stays between 0 and 1 outside of it.
    left = (limit - extra_info["response_tokens"]) / buffer
    return float(min(1.0, max(0.0, left)))


def quick(extra_info: Info, seconds: float) -> float:
    """Return 1 if a rollout waited for its tools for at most `seconds`, else 0."""
    return float(extra_info["tool_seconds"] <= seconds)
