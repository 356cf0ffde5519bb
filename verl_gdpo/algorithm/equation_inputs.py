"""What the equation is given: the options, and inputs that are checked and made tensors.

Shape suffixes: B samples, K rewards.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

PAPER_EPS = 1e-4  # of the authors' code and of TRL
VERL_EPS = 1e-6  # of verl's own grpo and gdpo

GroupNorm = Literal["per_reward", "summed"]
BatchNorm = Literal["sample", "token", "none"]
# (z_BK, rewards_BK, group_index_B, weights_K, present_BK, valid_B) -> S_B; see variants.py
Combine = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Options:
    """The keywords of `compute_gdpo_advantage` that choose the method.

    ============  =============  ================  =================================
    group_norm    batch_norm     normalize_by_std  method
    ============  =============  ================  =================================
    per_reward    sample         True              GDPO
    per_reward    none           True              GDPO without batch norm
    per_reward    token          True              verl's built-in `gdpo`
    summed        none           True              GRPO
    summed        none           False             GRPO without std (Dr. GRPO)
    summed        sample         True              GRPO + batch norm
    ============  =============  ================  =================================

    group_norm: normalise each reward ("per_reward") or their weighted sum ("summed").
    normalize_by_std: if False, step 1 subtracts the group's mean and does not divide.
    batch_norm: whether step 3 counts samples ("sample"), response tokens ("token"), or is left out
        ("none").
    eps: number added to the std in steps 1 and 3.
    batch_eps: number added to the std in step 3 instead of eps. With None, eps is used.
    batch_var_eps: number added to the variance in step 3, before the square root.
    combine: function that replaces the weighted sum of step 2; see `variants`.
    """

    group_norm: GroupNorm = "per_reward"
    normalize_by_std: bool = True
    batch_norm: BatchNorm = "sample"
    eps: float = PAPER_EPS
    batch_eps: float | None = None
    batch_var_eps: float = 0.0
    combine: Combine | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for an option that is unknown, out of range, or excludes another."""
        for name, kind in (("group_norm", GroupNorm), ("batch_norm", BatchNorm)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise ValueError(f"{name}: expected one of {list(get_args(kind))}, got {value!r}")
        for name in ("eps", "batch_eps", "batch_var_eps"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
        if self.combine is not None and self.group_norm == "summed":
            raise ValueError(
                "combine needs group_norm='per_reward': 'summed' adds the rewards first"
            )


def group_index(group_ids: Any, B: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the group number of each sample, (B,) int64 from 0, and the number of groups."""
    if isinstance(group_ids, Tensor):
        group_ids = group_ids.cpu().numpy()
    ids = group_ids.tolist() if isinstance(group_ids, np.ndarray) else list(group_ids)
    if len(ids) != B:
        raise ValueError(f"group_ids: expected {B}, one per row of rewards_BK, got {len(ids)}")
    kinds = set(map(type, ids))
    # bools are refused: they are probably the result of a comparison passed by mistake
    integers = all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds)
    if not integers and not all(issubclass(kind, str) for kind in kinds):
        names = sorted(kind.__name__ for kind in kinds)
        raise TypeError(f"group_ids: expected all integers or all strings, got {names}")
    number: dict[Any, int] = defaultdict(count().__next__)
    index = np.fromiter(map(number.__getitem__, ids), dtype=np.int64)
    return torch.from_numpy(index).to(device), len(number)


def group_sum(values_BK: Tensor, group_B: Tensor, count: int | None = None) -> Tensor:
    """Return the sums over each group, (G, K). With count=None, G is the highest number plus 1."""
    G = int(group_B.max()) + 1 if count is None else count
    return values_BK.new_zeros((G, values_BK.shape[1])).index_add_(0, group_B, values_BK)


def reward_tensor(rewards: Any) -> Tensor:
    """Return rewards as a tensor: arrays keep their dtype, Python numbers become float64."""
    if isinstance(rewards, Tensor | np.ndarray):
        return where_it_is(rewards)
    return torch.as_tensor(rewards, dtype=torch.float64)


def where_it_is(values: Any) -> Tensor:
    """Return values as a tensor. A tensor keeps its device; `as_tensor` would move it."""
    return values if isinstance(values, Tensor) else torch.as_tensor(values)


def finite_rewards(rewards_BK: Tensor, present_BK: Tensor) -> Tensor:
    """Return rewards in float64, 0 where absent; raise ValueError for NaN or inf."""
    rewards_BK = rewards_BK.to(torch.float64)
    bad_BK = ~torch.isfinite(rewards_BK) & present_BK
    if bad_BK.any():
        row, column = (int(i) for i in bad_BK.nonzero()[0])
        raise ValueError(
            f"rewards_BK[{row}, {column}] is {rewards_BK[row, column].item()}; expected a finite "
            "number (mark rewards that do not apply with present_BK, padding with valid_B)"
        )
    return torch.where(present_BK, rewards_BK, 0.0)


def reward_weights(weights: Any, K: int, device: torch.device) -> Tensor:
    """Return weights_K in float64, all 1 for None; raise ValueError if they are not K numbers."""
    if weights is None:
        return torch.ones(K, dtype=torch.float64, device=device)
    weights_K = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if weights_K.shape != (K,) or not torch.isfinite(weights_K).all():
        raise ValueError(f"weights: expected {K} finite numbers, got {weights_K.tolist()}")
    return weights_K


def row_mask(name: str, mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the mask as a bool tensor, all True for None; raise ValueError for another shape."""
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=device)
    tensor = torch.as_tensor(mask, device=device)
    if tensor.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return tensor.to(torch.bool)


def has_a_reward(present_BK: Any, weights_K: Any) -> Any:
    """Return which samples have a reward with a weight, (B,) bool; tensors or arrays.

    The others can say nothing about the policy, so step 3 leaves them out, as TRL does.
    """
    return (present_BK & (weights_K != 0)).any(1)
