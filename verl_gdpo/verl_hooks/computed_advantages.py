"""What verl's advantage step came to, row by row, taken while its padded tensors are at hand.

Out of TransferQueue the same numbers would cost two columns of tokens at each step.

Relies on verl 0.9 `trainer_base.compute_advantage_for_multi_trajectories(data, ...)`, which returns
`data` with the tensors `advantages` and `response_mask` of all rows, in the order of the batch.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.batch.matrix import current_input


@dataclass(frozen=True)
class Outcome:
    """Of B rows; rejection in rollout correction may have changed their masks."""

    trained_B: npt.NDArray[np.int64]  # tokens that are trained
    advantage_B: npt.NDArray[np.float64]  # mean over them: outcome estimators give each the same

    @classmethod
    def of(cls, advantages_BT: torch.Tensor, response_mask: torch.Tensor) -> "Outcome":
        """A row without trained tokens has the advantage 0."""
        is_trained_BT = response_mask != 0
        trained_B = is_trained_BT.sum(dim=1)
        total_B = torch.where(is_trained_BT, advantages_BT, 0.0).sum(dim=1, dtype=torch.float64)
        advantage_B = total_B / trained_B.clamp(min=1)
        return cls(trained_B.cpu().numpy(), advantage_B.cpu().numpy())


# of the batch for which a trainer has set `current_input`
_current: ContextVar[Outcome | None] = ContextVar("verl_gdpo_outcome", default=None)


def forget_outcome() -> None:
    _current.set(None)


def noted_outcome() -> Outcome:
    """Of the batch since `forget_outcome`.

    Raises:
        RuntimeError: a trainer computes advantages by other means than verl's.
    """
    outcome = _current.get()
    if outcome is None:
        raise RuntimeError(
            "verl-gdpo: this trainer's _compute_advantage did not call verl's "
            "compute_advantage_for_multi_trajectories, of which the rollout dump and "
            "batch_norm=token are told which tokens are trained. Let it call that function, or "
            "set trainer.rollout_data_dir=null and another algorithm.gdpo.batch_norm"
        )
    return outcome


def noting_outcome(compute_advantage: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute_advantage)
    def compute_and_note(data: Any, *args: Any, **kwargs: Any) -> Any:
        data = compute_advantage(data, *args, **kwargs)
        if current_input.get() is not None:
            tensors = data.batch
            _current.set(Outcome.of(tensors["advantages"], tensors["response_mask"]))
        return data

    return compute_and_note
