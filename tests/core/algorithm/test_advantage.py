"""What `compute_gdpo_advantage` takes and gives, whatever torch's defaults are."""

import math

import numpy as np
import oracle
import pytest
import torch
from parity_batch import PARITY_GROUPS, PARITY_LENGTHS, PARITY_REWARDS, mask_of

from verl_gdpo import compute_gdpo_advantage
from verl_gdpo.algorithm.equation import compute_gdpo_scalars, spread_over_tokens

OPTIONS = {"weights": [1.0, 5.0], "group_norm": "summed", "eps": 0.25, "batch_eps": 0.5}


OPTIONS |= {"valid_B": [i != 5 for i in range(12)], "normalize_by_std": False, "batch_var_eps": 2.0}


OPTIONS |= {"batch_norm": "token", "combine": lambda z_BK, *_: z_BK[:, 0]}


OPTIONS |= {"present_BK": [[True, i % 3 > 0] for i in range(12)]}


@pytest.mark.parametrize("name", OPTIONS)
def test_both_functions_have_the_same_options(name):
    mask, option = mask_of(PARITY_LENGTHS), {name: OPTIONS[name]}
    expected = compute_gdpo_scalars(
        PARITY_REWARDS, PARITY_GROUPS, token_count_B=PARITY_LENGTHS, **option
    ).A_B
    assert (expected - compute_gdpo_scalars(PARITY_REWARDS, PARITY_GROUPS).A_B).abs().max() > 1e-3
    public = {"present" if name == "present_BK" else name: OPTIONS[name]}
    actual = compute_gdpo_advantage(PARITY_REWARDS, PARITY_GROUPS, mask, **public)
    torch.testing.assert_close(actual, spread_over_tokens(expected, mask))


@pytest.mark.parametrize("device", ["cpu"] + ["cuda"] * torch.cuda.is_available())
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_output_is_float32_on_the_mask_device(device, mask_dtype):
    mask = mask_of(PARITY_LENGTHS).to(device, mask_dtype)
    advantages = compute_gdpo_advantage(
        np.array(PARITY_REWARDS), np.array(PARITY_GROUPS, dtype=object), mask
    )
    assert advantages.dtype == torch.float32
    assert advantages.device == mask.device
    assert torch.equal(advantages != 0, (mask != 0) & (advantages[:, :1] != 0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards_BK": [[1.0], [math.nan]]}, r"rewards_BK\[1, 0\] is nan"),
        ({"rewards_BK": [[math.inf], [1.0]]}, r"rewards_BK\[0, 0\] is inf"),
        ({"rewards_BK": [1.0, 2.0]}, r"rewards_BK: expected shape .*, got \(2,\)"),
        ({"rewards_BK": np.ones((2, 0))}, r"rewards_BK: expected shape .*, got \(2, 0\)"),
        ({"group_ids": [0]}, "group_ids: expected 2, one per row of rewards_BK, got 1"),
        ({"response_mask_BT": [1, 1]}, "response_mask_BT: expected shape"),
        ({"weights": [1.0, 2.0, 3.0]}, "weights: expected 1 finite numbers"),
        ({"weights": [math.nan]}, "weights: expected 1 finite numbers"),
        ({"weights": [1e39]}, "weights: expected 1 finite numbers up to 1e\\+38"),
        ({"present": [[True]] * 12}, r"present: expected shape \(2, 1\), got \(12, 1\)"),
        ({"response_mask_BT": [[1]]}, "response_mask_BT: expected 2 rows, .* got 1"),
        ({"valid_B": [True]}, "valid_B: expected shape"),
        ({"group_norm": "sum"}, "group_norm: got 'sum'; Input should be 'per_reward' or "),
        ({"batch_norm": "tokens"}, "batch_norm: got 'tokens'; Input should be 'sample', 'token' "),
        ({"eps": -1e-4}, "eps: got -0.0001; Input should be greater than or equal to 0"),
        ({"batch_eps": math.nan}, "batch_eps: got nan; Input should be a finite number"),
        ({"batch_var_eps": -1.0}, "batch_var_eps: got -1.0; Input should be greater than or eq"),
    ],
)
def test_bad_arguments_are_named(options, message):
    arguments = {"rewards_BK": [[1.0], [2.0]], "group_ids": [0, 0], "response_mask_BT": [[1], [1]]}
    with pytest.raises(ValueError, match=message):
        compute_gdpo_advantage(**arguments | options)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def other_default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def test_the_default_dtype_changes_nothing(other_default_dtype):
    rewards = [[0.1, 0.7], [0.4, 0.2], [0.3, 0.3], [0.2, 0.9]]
    advantages = compute_gdpo_advantage(rewards, "aabb", [[1, 1]] * 4, weights=[0.3, 0.7])
    assert advantages.dtype == torch.float32
    expected = oracle.gdpo(rewards, "aabb", weights=[0.3, 0.7])
    assert advantages[:, 1].tolist() == pytest.approx(expected, rel=1e-6)
    # meta is a device other than the CPU
    elsewhere = spread_over_tokens(torch.zeros(4), torch.ones(4, 2, device="meta"))
    assert (elsewhere.dtype, elsewhere.device.type) == (torch.float32, "meta")


@pytest.mark.parametrize("batch_norm", ["sample", "token"])
@pytest.mark.parametrize("group_norm", ["per_reward", "summed"])
def test_the_default_device_changes_nothing(batch_norm, group_norm):
    rewards, mask = torch.tensor(PARITY_REWARDS), mask_of(PARITY_LENGTHS)
    options = {"group_norm": group_norm, "batch_norm": batch_norm}
    expected = compute_gdpo_advantage(rewards, PARITY_GROUPS, mask, **options)
    masks = {"weights": [1, 1], "valid_B": [True] * 12, "present": [[True, True]] * 12}
    with torch.device("meta"):  # without data, so that what were made there could not be used
        for also in ({}, masks):
            assert torch.equal(
                compute_gdpo_advantage(rewards, PARITY_GROUPS, mask, **options, **also), expected
            )
        lengths = {"token_count_B": PARITY_LENGTHS}
        A_B = compute_gdpo_scalars(rewards, PARITY_GROUPS, **options, **lengths).A_B
    assert torch.equal(spread_over_tokens(A_B, mask), expected)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("group_norm", ["per_reward", "summed"])
def test_the_advantage_has_no_gradient(mode, group_norm):
    rewards = torch.tensor(PARITY_REWARDS, requires_grad=True)
    mask = mask_of(PARITY_LENGTHS).float().requires_grad_()
    weights = torch.ones(2, requires_grad=True)
    with mode():
        options = {"weights": weights, "group_norm": group_norm}
        advantages = compute_gdpo_advantage(rewards, PARITY_GROUPS, mask, **options)
        steps = compute_gdpo_scalars(rewards, PARITY_GROUPS, **options)
        spread = spread_over_tokens(steps.A_B, mask)
    assert not any(tensor.requires_grad for tensor in (advantages, *steps, spread))
    without = compute_gdpo_advantage(PARITY_REWARDS, PARITY_GROUPS, mask > 0, group_norm=group_norm)
    assert torch.equal(advantages, without)


def test_inference_tensors_are_taken():
    with torch.inference_mode():
        rewards, mask = torch.tensor(PARITY_REWARDS), mask_of(PARITY_LENGTHS).float()
    advantages = compute_gdpo_advantage(rewards, PARITY_GROUPS, mask)
    ratio = torch.ones_like(advantages, requires_grad=True)
    (ratio * advantages).sum().backward()
    assert torch.equal(ratio.grad, advantages)
