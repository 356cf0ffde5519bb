"""Notes the advantage and the trained tokens of each row when verl computes them.

To get the same numbers later, we would have to fetch two columns of tokens from TransferQueue at
each step.

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
    """The advantages of B rows, after rollout correction has changed their masks."""

    trained_B: npt.NDArray[np.int64]  # number of trained tokens
    advantage_B: npt.NDArray[np.float64]  # mean over the trained tokens, which are usually equal

    @classmethod
    def of(cls, advantages_BT: torch.Tensor, response_mask: torch.Tensor) -> "Outcome":
        """Return the outcome. A row without trained tokens gets the advantage 0."""
        is_trained_BT = response_mask != 0
        trained_B = is_trained_BT.sum(dim=1)
        total_B = torch.where(is_trained_BT, advantages_BT, 0.0).sum(dim=1, dtype=torch.float64)
        advantage_B = total_B / trained_B.clamp(min=1)
        return cls(trained_B.cpu().numpy(), advantage_B.cpu().numpy())


# the outcome of the batch for which a trainer has set `current_input`
_current: ContextVar[Outcome | None] = ContextVar("verl_gdpo_outcome", default=None)


def forget_outcome() -> None:
    """Clear the outcome before the next batch."""
    _current.set(None)


def noted_outcome() -> Outcome:
    """Return the outcome that was noted since `forget_outcome`.

    Raises:
        RuntimeError: the trainer does not compute advantages with verl's function.
    """
    outcome = _current.get()
    if outcome is None:
        raise RuntimeError(
            "verl-gdpo: this trainer's _compute_advantage did not call verl's "
            "compute_advantage_for_multi_trajectories. The rollout dump and batch_norm=token get "
            "from it which tokens are trained. Let _compute_advantage call that function, or "
            "set trainer.rollout_data_dir=null and another algorithm.gdpo.batch_norm"
        )
    return outcome


def noting_outcome(compute_advantage: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute_advantage` extended to note the outcome of batches of our trainers."""

    @functools.wraps(compute_advantage)
    def compute_and_note(data: Any, *args: Any, **kwargs: Any) -> Any:
        data = compute_advantage(data, *args, **kwargs)
        if current_input.get() is not None:
            tensors = data.batch
            _current.set(Outcome.of(tensors["advantages"], tensors["response_mask"]))
        return data

    return compute_and_note
