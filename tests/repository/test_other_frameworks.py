"""The advantages of other frameworks for three groups, beside ours: see docs/without_verl.md."""

import numpy as np
import pytest
import torch
from parity_batch import PARITY_GROUPS, PARITY_REWARDS

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.settings import DIALECTS

# Three groups of four samples; in the last one, all samples have the same rewards.
HERE = [
    *(1.915, 0.000, 0.000, -1.915),
    *(0.827, 0.827, -1.509, -0.146),
    *(0.000, 0.000, 0.000, 0.000),
]
LEAVE_ONE_OUT = [
    *(1.634, 0.102, 0.102, -1.430),
    *(0.726, 0.726, -2.273, 0.006),
    *(0.102, 0.102, 0.102, 0.102),
]


def test_the_numbers_of_the_other_frameworks():
    mask = torch.ones(12, 1)
    for options in (DIALECTS["paper"], DIALECTS["trl"], DIALECTS["nemo_rl"], {"eps": 1e-8}):
        actual = compute_gdpo_advantage(PARITY_REWARDS, PARITY_GROUPS, mask, **options)[:, 0]
        assert actual.tolist() == pytest.approx(HERE, abs=6e-4)
    assert nemo_rls_leave_one_out(PARITY_REWARDS) == pytest.approx(LEAVE_ONE_OUT, abs=6e-4)


def nemo_rls_leave_one_out(rewards, G=4):
    """Each sample against the mean and the spread of the others in its group."""
    S = [0.0] * len(rewards)
    for i in range(len(rewards)):
        others = [rewards[j] for j in range(i - i % G, i - i % G + G) if j != i]
        for k, value in enumerate(rewards[i]):
            column = [row[k] for row in others]
            spread = np.std(column, ddof=1)
            S[i] += (value - np.mean(column)) / (spread + 1e-6 if spread > 0 else 1.0)
    return list((np.array(S) - np.mean(S)) / np.std(S, ddof=1))
