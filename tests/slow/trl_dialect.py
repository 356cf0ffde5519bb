"""Compares the dialect `trl` with TRL's own method. Only `nox -s trl` runs it, not pytest alone."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from parity_batch import PARITY_REWARDS
from trl import GRPOTrainer

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.settings import DIALECTS


class Trainer(SimpleNamespace):
    """As much of a GRPOTrainer as its method asks for, with given rewards instead of rollouts."""

    def __init__(self, rewards_BK, weights, num_generations):
        names = [f"reward {k}" for k in range(rewards_BK.shape[1])]
        super().__init__(
            accelerator=Accelerator(cpu=True),
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            args=SimpleNamespace(
                gradient_checkpointing_kwargs=None,
                per_device_train_batch_size=len(rewards_BK),
                per_device_eval_batch_size=len(rewards_BK),
                steps_per_generation=1,
                gradient_accumulation_steps=1,
            ),
            _tokenizer=SimpleNamespace(pad_token_id=0),
            reward_funcs=names,
            reward_func_names=names,
            reward_weights=weights,
            num_generations=num_generations,
            multi_objective_aggregation="normalize_then_sum",
            num_iterations=1,
            beta=0.0,
            rewards_BK=rewards_BK,
            _metrics={"train": defaultdict(list)},
            _logs=defaultdict(list) | {"rewards": defaultdict(list)},
            _pending_extra_logs={},
            _pending_metrics={},
        )

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None  # an option that is off

    def _generate(self, prompts):
        ones = [[1]] * len(prompts)
        return ones, ones, None, ["x"] * len(prompts), None, {}, None, None

    def _calculate_rewards(self, *_):
        return self.rewards_BK


def trls(rewards_BK, weights, num_generations):
    trainer = Trainer(rewards_BK, weights, num_generations)
    inputs = [{"prompt": "x"}] * len(rewards_BK)
    return GRPOTrainer._generate_and_score_completions(trainer, inputs)["advantages"]


def ours(rewards_BK, weights, num_generations, **options):
    groups = [i // num_generations for i in range(len(rewards_BK))]
    mask = torch.ones(len(rewards_BK), 1)
    options = {"weights": weights, **DIALECTS["trl"], **options}
    return compute_gdpo_advantage(rewards_BK, groups, mask, **options)[:, 0]


@pytest.mark.parametrize("num_generations", [2, 4, 16])
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_to_trl(num_generations, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    # in float32, TRL's roundings exceed 1e-5 where the values of a group are very close
    rewards_BK = torch.randint(-3, 4, (32, 3), generator=generator).to(dtype)
    if dtype is torch.float64:
        rewards_BK = torch.randn(32, 3, generator=generator, dtype=dtype) + 1
    weights = torch.rand(3, generator=generator) + 0.1
    expected = trls(rewards_BK, weights, num_generations)
    actual = ours(rewards_BK, weights, num_generations)
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.5


@pytest.mark.parametrize("num_generations", [2, 4, 16])
@pytest.mark.parametrize("seed", range(20))
def test_missing_rewards(num_generations, seed):
    """In TRL they are NaN. Some groups have one value of a reward, or none."""
    generator = torch.Generator().manual_seed(seed)
    rewards_BK = torch.randn(32, 3, generator=generator, dtype=torch.float64)
    present_BK = torch.rand(32, 3, generator=generator) < 0.5
    # a sample without any reward is no part of the batch step
    has_one_B = present_BK.any(dim=1)
    assert has_one_B.any() and not has_one_B.all()
    actual = ours(rewards_BK, torch.ones(3), num_generations, present=present_BK)
    expected = trls(rewards_BK.masked_fill(~present_BK, torch.nan), torch.ones(3), num_generations)
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=1e-5)
    assert expected.abs().max() > 0.5


def test_the_parity_batch():
    rewards_BK = torch.tensor(PARITY_REWARDS)
    expected = trls(rewards_BK, torch.ones(2), 4)
    table = [1.915, 0, 0, -1.915, 0.827, 0.827, -1.509, -0.146, 0, 0, 0, 0]
    assert expected.tolist() == pytest.approx(table, abs=1e-3)
    torch.testing.assert_close(ours(rewards_BK, torch.ones(2), 4), expected, rtol=0, atol=1e-5)
