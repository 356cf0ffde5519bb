"""Batches that a test of many examples draws, and one that is the same each time."""

import torch
from hypothesis import strategies as st


@st.composite
def batches(draw, reward, weight, there=st.booleans()):  # noqa: B008
    """Up to 14 samples of three groups with up to 4 rewards; `there`: what is no padding."""
    n, k = draw(st.integers(1, 14)), draw(st.integers(1, 4))

    def rows_of(strategy):
        return draw(st.lists(strategy, min_size=n, max_size=n))

    def of_rewards(strategy):
        return st.lists(strategy, min_size=k, max_size=k)

    return {
        "rewards": rows_of(of_rewards(reward)),
        "groups": rows_of(st.sampled_from("abc")),
        "present": rows_of(of_rewards(there)),
        "valid": rows_of(there),
        "lengths": rows_of(st.integers(0, 9)),
        "weights": draw(of_rewards(weight)),
    }


def random_batch(seed=0, n=24, k=3, G=4):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.rand((n, k), generator=generator, dtype=torch.float64).round(decimals=1)
    return rewards, [i // G for i in range(n)]
