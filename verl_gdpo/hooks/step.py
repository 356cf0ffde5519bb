"""What our parts know of one step: the only state that verl does not pass along for us.

verl calls the estimator with tensors, and the code around it with metrics, so nothing of ours fits
between them. A trainer opens a `Step` with `with`. The estimator adds `scalars`, the wrapper of
verl's function adds `outcome`, and the trainer then makes metrics and dump columns of both.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm.equation import GdpoScalars
from verl_gdpo.algorithm.matrix import RewardMatrix, rewards_among
from verl_gdpo.algorithm.metrics import batch_metrics, scoring_metrics, settings_of_advantage
from verl_gdpo.algorithm.samples import BatchRows, group_of
from verl_gdpo.algorithm.settings import GdpoSettings

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


@dataclass(frozen=True)
class Outcome:
    """The advantages of B rows, after rollout correction has changed their masks."""

    trained_B: npt.NDArray[np.int64]  # number of trained tokens
    advantage_B: npt.NDArray[np.float64]  # mean over the trained tokens, which are usually equal

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "Outcome":
        """Return the outcome, given verl's `advantages` and `response_mask`, both (B, T).

        A row without trained tokens gets the advantage 0.
        """
        is_trained_BT = tensors["response_mask"] != 0
        trained_B = is_trained_BT.sum(dim=1)
        advantages_BT = torch.where(is_trained_BT, tensors["advantages"], 0.0)
        total_B = advantages_BT.sum(dim=1, dtype=torch.float64)
        advantage_B = total_B / trained_B.clamp(min=1)
        return cls(trained_B.cpu().numpy(), advantage_B.cpu().numpy())


@dataclass(eq=False)
class Step:
    """One batch on its way from rows to advantages."""

    settings: GdpoSettings  # as they were checked when the run started
    rows: BatchRows
    scalars: GdpoScalars | None = None  # None: another estimator than gdpo ran
    outcome: Outcome | None = None
    _token: "Token[Step | None] | None" = field(default=None, repr=False)

    @functools.cached_property
    def rewards(self) -> RewardMatrix:
        """The reward matrix, made once for the estimator and the metrics; see `RewardMatrix.of`."""
        rewards = RewardMatrix.of(self.rows, self.settings)
        names = tuple(rewards.weights)
        if names not in _said:  # looking through all columns at each step would take time
            _said.add(names)
            in_use = ", ".join(f"{name} {weight:g}" for name, weight in rewards.weights.items())
            all_ = "" if self.settings.rewards else " (all numbers that are returned)"
            others = [name for name in rewards_among(self.rows.columns) if name not in names]
            unused = f"; returned, and not used: {', '.join(others)}" if others else ""
            logger.info("verl-gdpo: rewards in use, with weights%s: %s%s", all_, in_use, unused)
        return rewards

    def check(self, adv_estimator: str) -> None:
        """Raise RewardError for what the batch must not train on, whichever estimator runs.

        See `RewardMatrix.of` and `RewardMatrix.check_own_scores`.
        """
        if adv_estimator == "gdpo":
            _ = self.rewards
        else:
            self.rewards.check_own_scores(self.rows)

    @property
    def computed(self) -> Outcome:
        """The outcome.

        Raises:
            RuntimeError: the trainer does not compute advantages with verl's function.
        """
        if self.outcome is None:
            raise RuntimeError(
                "verl-gdpo: this trainer's _compute_advantage did not call verl's "
                "compute_advantage_for_multi_trajectories. The rollout dump and batch_norm=token "
                "get from it which tokens are trained. Let _compute_advantage call that function, "
                "or set trainer.rollout_data_dir=null and another algorithm.gdpo.batch_norm"
            )
        return self.outcome

    @property
    def keys(self) -> list[str]:
        """`{uid}_{session}_{index}` of each row."""
        return [self.rows.label(row) for row in range(len(self.rows))]

    def metrics(
        self, adv_estimator: str, length_B: Sequence[int], *, by_source: bool
    ) -> dict[str, float]:
        """Return the metrics of the step, whose advantages are computed; see `batch_metrics`.

        Args:
            adv_estimator: `algorithm.adv_estimator`.
            length_B: the length of each row's response in tokens.
            by_source: whether rewards are also told by data source.
        """
        settings = settings_of_advantage(adv_estimator, self.settings)
        by_token = settings is not None and settings.batch_norm == "token"
        found = batch_metrics(
            self.rewards,
            self.rows.counted_B,
            [group_of(key) for key in self.keys],
            # with by_token, those that are trained: rollout correction has changed the masks
            self.rows.over_sessions(self.computed.trained_B if by_token else np.array(length_B)),
            settings,
            self.settings.bounds,
            self.rows.sources if by_source else None,
            self.scalars,
        )
        return found | scoring_metrics(self.rows)

    def __enter__(self) -> "Step":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)


_current: ContextVar[Step | None] = ContextVar("verl_gdpo_step", default=None)
# the legacy trainer whose `fit` runs in this context; verl's `compute_advantage` does not know it
fitting: ContextVar[Any] = ContextVar("verl_gdpo_legacy_trainer", default=None)


def current_step() -> Step | None:
    """Return the step that a trainer has opened in this context, or None."""
    return _current.get()


_said: set[tuple[str, ...]] = set()  # sets of rewards that have been logged
