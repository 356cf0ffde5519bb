"""The numbers in docs/without_verl.md."""

import numpy as np
import pytest
import torch
from pages import rows_after
from parity_batch import PARITY_GROUPS, PARITY_REWARDS

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.settings import DIALECTS


def test_the_numbers_of_the_other_frameworks():
    rows = rows_after("docs/without_verl.md", "| | group a | group b | group c |")
    here, leave_one_out = ([float(x) for x in " ".join(row[1:]).split()] for row in rows)
    mask = torch.ones(12, 1)
    for options in (DIALECTS["paper"], DIALECTS["trl"], DIALECTS["nemo_rl"], {"eps": 1e-8}):
        actual = compute_gdpo_advantage(PARITY_REWARDS, PARITY_GROUPS, mask, **options)[:, 0]
        assert actual.tolist() == pytest.approx(here, abs=6e-4)
    assert nemo_rls_leave_one_out(PARITY_REWARDS) == pytest.approx(leave_one_out, abs=6e-4)


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
