"""What is known of a step: who sees it, and the advantage and the trained tokens of each row."""

import threading
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import Condition, GdpoSettings, RewardTerm
from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.hooks import advantage_step, configuration, estimator, legacy
from verl_gdpo.hooks.advantage_step import AdvantageStep, TokenAdvantages, current_step


def make_step():
    return AdvantageStep(GdpoSettings(), BatchRows.from_columns({"a": [1.0, 2.0]}, ["u"] * 2))


def test_a_step_is_known_while_it_is_open():
    outer, inner = make_step(), make_step()
    with outer:
        with pytest.raises(ZeroDivisionError), inner:
            assert current_step() is inner
            raise ZeroDivisionError
        assert current_step() is outer
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(current_step()))
        thread.start()
        thread.join()
        assert elsewhere == [None]
    assert current_step() is None


def test_the_rewards_in_use_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(advantage_step, "_logged", set())
    monkeypatch.setattr(advantage_step, "_had", set())  # by tests before this one
    rows = BatchRows.from_columns({"a": [1.0, 1.0], "b": [2.0, 2.0]}, ["u"] * 2)
    settings = GdpoSettings(rewards={"a": RewardTerm(0.5)})
    for given in (settings, settings, GdpoSettings()):
        assert AdvantageStep(given, rows).rewards
    assert [record.getMessage() for record in caplog.records] == [
        "verl-gdpo: rewards in use, with weights: a 0.5; returned, and not used: b",
        "verl-gdpo: rewards in use, with weights (all numbers that are returned): a 1, b 1",
    ]


@pytest.mark.parametrize("estimator", ["gdpo", "grpo"])
def test_a_step_ends_where_failing_a_condition_pays_unless_the_user_wants_it(
    estimator, caplog, monkeypatch
):
    monkeypatch.setattr(configuration, "_warned", set())
    costs = (
        {"right": [1.0, 1.0, 0.0], "cost": [0.0, 0.0, 0.0]},
        {
            "right": [1.0, 1.0, 0.0],
            "cost": [0.0, -3.5, 0.0],
        },
    )
    first, second = (BatchRows.from_columns(columns, ["u"] * 3) for columns in costs)
    term = RewardTerm(when=Condition("right", 1.0))
    default = GdpoSettings(rewards={"right": RewardTerm(), "cost": term})
    AdvantageStep(default, first).check(estimator)  # nothing is negative yet
    message = r"^algorithm.gdpo.rewards.cost: a sample .* better than -3.5, which row 1 has, so"
    with pytest.raises(RewardError, match=message):
        AdvantageStep(default, second).check(estimator)
    assert not any("cost: a sample" in text for text in caplog.messages)
    zero = replace(default, rewards={**default.rewards, "cost": replace(term, otherwise="zero")})
    for _ in range(2):
        AdvantageStep(zero, second).check(estimator)
    (warning,) = (each for each in caplog.records if "cost: a sample" in each.getMessage())
    assert warning.levelname == "WARNING" and "otherwise=zero" in warning.getMessage()


def test_a_token_counts_once_whatever_marks_it():
    mask = torch.tensor([[1, 0, 2, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    advantages = torch.tensor([[0.5, 9.0, 0.5, 0.5], [1.0, 2.0, 3.0, 9.0], [7.0] * 4])
    outcome = TokenAdvantages.of({"advantages": advantages, "response_mask": mask})
    assert outcome.trained_B.tolist() == [3, 3, 0]
    # the mean over the tokens that are trained; 0 where none is
    assert outcome.advantage_B.tolist() == [0.5, 2.0, 0.0]


class LargestResult(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A view of the batch takes no memory.
        if isinstance(result, torch.Tensor) and "split" not in str(func):
            self.bytes = max(self.bytes, result.nbytes)
        return result


def counts_of_token_norm(mask, advantages):
    """What the estimator counts under batch_norm=token."""
    rows = BatchRows.from_columns({"a": [0.0] * len(mask)}, ["u"] * len(mask))
    return estimator._trained_tokens(mask, rows)


def counts_of_step(mask, advantages):
    return TokenAdvantages.of({"advantages": advantages, "response_mask": mask}).trained_B


def counts_of_legacy(mask, advantages):
    return legacy.response_lengths({"response_mask": mask})


@pytest.mark.parametrize("count", [counts_of_step, counts_of_token_norm, counts_of_legacy])
def test_tokens_are_counted_without_a_copy_of_the_batch(count):
    # a step of 8,192 samples of 8,000 tokens has 65 million of them
    mask = torch.ones(4096, 40, dtype=torch.long)
    mask[:, 30:] = 0
    advantages = mask * 0.5
    with LargestResult() as largest:
        counts = count(mask, advantages)
    assert list(counts) == [30] * 4096
    # not even a byte for each token, beside the numbers of the rows
    assert largest.bytes < mask.numel() / 2


def test_a_trainer_that_computes_advantages_otherwise_is_told():
    expected = r"did not call verl's compute_advantage_for_multi.*trainer.rollout_data_dir=null"
    with pytest.raises(RuntimeError, match=expected):
        _ = make_step().computed
