"""The advantage and the trained tokens of each row, which the dump and the metrics use."""

import pytest
import torch

from verl_gdpo.verl_hooks.computed_advantages import Outcome, forget_outcome, noted_outcome


def test_a_token_counts_once_whatever_marks_it():
    mask = torch.tensor([[1, 0, 2, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    advantages = torch.tensor([[0.5, 9.0, 0.5, 0.5], [1.0, 2.0, 3.0, 9.0], [7.0] * 4])
    outcome = Outcome.of(advantages, mask)
    assert outcome.trained_B.tolist() == [3, 3, 0]
    # the mean over the tokens that are trained; 0 where none is
    assert outcome.advantage_B.tolist() == [0.5, 2.0, 0.0]


def test_a_trainer_that_computes_advantages_otherwise_is_told():
    forget_outcome()
    with pytest.raises(RuntimeError, match="did not call verl's compute_advantage_for_multi"):
        noted_outcome()
