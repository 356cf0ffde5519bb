"""The rewards of length and time, in a list of reward functions."""

import pytest
from listed_functions import config_of, score

from verl_gdpo.scoring.lengths import at_most, overlong, smooth

pytestmark = pytest.mark.usefixtures("event_loop")


def test_rewards_of_length_and_time():
    path = "pkg://verl_gdpo.scoring.lengths"
    entries = {
        "most": {"path": path, "name": "at_most", "limit": 9},  # the response has 9 tokens
        "less": {"path": path, "name": "at_most", "limit": 8},
        "smooth": {"path": path, "name": "smooth", "limit": 9},
        "over": {"path": path, "name": "overlong", "limit": 10, "buffer": 4},
        "quick": {"path": path, "name": "quick", "seconds": 2},
    }
    fast = {"most": 1.0, "less": 0.0, "smooth": 0.5, "over": 0.25, "quick": 1.0}
    assert score(config_of(entries))["reward_extra_info"] == {**fast, "score": 2.75}
    result = score(config_of(entries), tool_extra_fields={"tool_seconds": 2.5})
    assert result["reward_extra_info"]["quick"] == 0.0
    assert [smooth({"generated_tokens": n}, 9) for n in (0, 10**9)] == pytest.approx(
        [0.545, 0], abs=1e-3
    )


@pytest.mark.parametrize("tokens", [0, 399, 400, 401, 10**9])
def test_each_is_between_0_and_1_and_falls_with_the_length(tokens):
    shorter = {"generated_tokens": max(0, tokens - 1), "response_tokens": max(0, tokens - 1)}
    longer = {"generated_tokens": tokens, "response_tokens": tokens}
    for reward in (
        lambda info: at_most(info, 400),
        lambda info: smooth(info, 400),
        lambda info: overlong(info, 400, buffer=100),
    ):
        assert 0 <= reward(longer) <= reward(shorter) <= 1


def test_overlong_is_1_plus_the_penalty_of_dapo():
    """Equation 13: 0 up to limit - buffer, then ((limit - buffer) - tokens) / buffer, then -1."""
    limit, buffer = 10, 4
    for tokens in range(15):
        if tokens <= limit - buffer:
            penalty = 0.0
        elif tokens <= limit:
            penalty = ((limit - buffer) - tokens) / buffer
        else:
            penalty = -1.0
        assert overlong({"response_tokens": tokens}, limit, buffer) == 1 + penalty
