"""Each dialect gives the same advantages as the implementation with its name.

TRL's own code runs in `trl_dialect.py`, which needs another environment.
"""

from math import sqrt

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from parity_batch import PARITY_GROUPS, PARITY_LENGTHS, PARITY_REWARDS, mask_of
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.equation import compute_gdpo_scalars, spread_over_tokens
from verl_gdpo.algorithm.settings import DIALECTS

SAMPLES = [1.915, 0, 0, -1.915, 0.827, 0.827, -1.509, -0.146, 0, 0, 0, 0]
TOKENS = [1.756, -0.188, -0.188, -2.132, 0.652, 0.652, -1.719, -0.336, *[-0.188] * 4]


def ours(dialect, rewards, groups, mask, **options):
    return compute_gdpo_advantage(rewards, groups, mask, **DIALECTS[dialect], **options)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_parity_batch(dialect):
    expected = {"verl_builtin": TOKENS}.get(dialect, SAMPLES)
    A_BT = ours(dialect, PARITY_REWARDS, PARITY_GROUPS, mask_of(PARITY_LENGTHS))
    assert A_BT[:, 0].tolist() == pytest.approx(expected, abs=1e-3)


# --- verl's own function -------------------------------------------------------------------------


def verls(rewards_BK, groups, mask_BT, weights):
    """What verl 0.9 computes for rewards in columns; prompts of one token."""
    names = [f"reward {k}" for k in range(rewards_BK.shape[1])]
    columns = {name: rewards_BK[:, k].numpy() for k, name in enumerate(names)}
    config = {"gdpo_reward_keys": names, "gdpo_reward_weights": weights}
    prompts = torch.ones(len(rewards_BK), 1, dtype=torch.long)
    advantages, _ = compute_gdpo_outcome_advantage(
        token_level_rewards=torch.zeros(mask_BT.shape),
        response_mask=mask_BT.float(),
        index=np.array(groups),
        config=OmegaConf.create(config),
        non_tensor_batch=columns,
        batch={"prompts": prompts, "attention_mask": torch.cat([prompts, mask_BT.long()], dim=1)},
    )
    return advantages


@given(
    seed=st.integers(0, 2**31),
    G=st.integers(2, 6),
    K=st.integers(1, 4),
    weights=st.lists(st.floats(0.125, 4, width=16), min_size=4, max_size=4),
)
def test_verl_builtin_on_random_batches(seed, G, K, weights):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randint(-3, 4, (4 * G, K), generator=generator).float()
    groups = [i // G for i in range(4 * G)]
    mask = mask_of(torch.randint(1, 9, (4 * G,), generator=generator).tolist())
    weights = weights[:K]
    scalars = compute_gdpo_scalars(
        rewards, groups, weights=weights, token_count_B=mask.sum(1), **DIALECTS["verl_builtin"]
    )
    # a z, up to sqrt(G), has some roundings of float32 in verl; the batch step divides by a std
    rounding = 8 * torch.finfo(torch.float32).eps * sum(weights) * sqrt(G)
    S_B, A_B = scalars.S_B, scalars.A_B
    std = ((S_B.max() - S_B.min()) / (A_B.max() - A_B.min())).item() if A_B.any() else 1e-4
    actual = verls(rewards, groups, mask, weights)
    expected = spread_over_tokens(A_B, mask)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=max(1e-5, rounding / std))


@pytest.mark.parametrize("weight", [1.0, 1e-3, 1e-4, 1e-5, 1e-7])
def test_verl_builtin_where_the_batch_has_next_to_no_variance(weight):
    """A small weight makes S small without taking float32's digits from it."""
    rewards = torch.tensor([[0.0], [1.0], [3.0], [1.0], [2.0], [2.0]])
    groups, mask = list("aaabbb"), mask_of([3, 1, 2, 5, 1, 4])
    expected = verls(rewards, groups, mask, [weight])
    assert expected.abs().max() > 0.5 * min(1, weight / 1e-4)
    actual = ours("verl_builtin", rewards, groups, mask, weights=[weight])
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6 * largest)


def test_verl_builtin_where_a_reward_and_its_complement_cancel():
    # verl's float32 leaves up to .003 of it, after dividing by sqrt(1e-8)
    share = torch.rand(64, generator=torch.Generator().manual_seed(0)).square()
    rewards = torch.stack([share, 1 - share], dim=1)
    groups, mask = [i // 4 for i in range(64)], torch.ones(64, 2)
    assert verls(rewards, groups, mask, [1.0, 1.0]).abs().max() < 0.02
    assert not ours("verl_builtin", rewards, groups, mask).any()
    assert not ours("nemo_rl", rewards, groups, mask).any()


def test_one_eps_for_both_steps_would_miss_where_most_groups_cancel():
    # 63 groups in which two rewards are opposed, one in which they agree: std S is .18
    rewards = torch.tensor([[0.0, 1.0], [1.0, 0.0]] * 63 + [[0.0, 0.0], [1.0, 1.0]])
    groups, mask = [i // 2 for i in range(128)], torch.ones(128, 3)
    expected = verls(rewards, groups, mask, [1.0, 1.0])
    builtin = ours("verl_builtin", rewards, groups, mask)
    torch.testing.assert_close(builtin, expected, rtol=0, atol=1e-5)
    one_eps = compute_gdpo_advantage(rewards, groups, mask, batch_norm="token", eps=1e-6)
    assert (one_eps - expected).abs().max() > 2e-5


# --- NeMo-RL, whose wheel is empty: its formulas as a loop ---------------------------------------


@given(seed=st.integers(0, 2**31), G=st.integers(2, 6), K=st.integers(1, 4))
def test_nemo_rl_on_random_batches(seed, G, K):
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(4 * G, K)) * rng.choice([0.1, 1, 10], size=K)
    weights = rng.uniform(0.1, 3, size=K)
    groups = [i // G for i in range(4 * G)]
    S = np.array(oracle.gdpo(rewards, groups, weights=[*weights], eps=1e-6, batch_norm="none"))
    expected = (S - S.mean()) / S.std(ddof=1)
    actual = ours("nemo_rl", rewards, groups, torch.ones(4 * G, 1), weights=weights)
    assert actual[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
