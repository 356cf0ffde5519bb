"""The record of one step: a batch on its way from rows to advantages, and its metrics.

verl calls the estimator with tensors, and the code around it with metrics, so nothing of ours fits
between them: the step is the only state that verl does not pass along for us. A trainer opens an
`AdvantageStep` with `with`. The estimator adds `scalars`, the function around verl's adds
`advantages`, and the trainer then makes metrics and dump columns of both.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm.conditions import paid_in_batch
from verl_gdpo.algorithm.equation import ROWS_AT_ONCE, GdpoScalars, count_tokens
from verl_gdpo.algorithm.failed_samples import drop_failed, refuse_failures
from verl_gdpo.algorithm.matrix import RewardMatrix, rewards_among
from verl_gdpo.algorithm.metrics import (
    batch_metrics,
    rollout_metrics,
    scoring_metrics,
    settings_of_advantage,
)
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, RewardError
from verl_gdpo.hooks.configuration import sums_first, warn_once

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)


@dataclass(frozen=True)
class TokenAdvantages:
    """The advantages of B rows, after rollout correction has changed their masks."""

    trained_B: npt.NDArray[np.int64]  # number of trained tokens
    advantage_B: npt.NDArray[np.float64]  # mean over the trained tokens, which are usually equal

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> "TokenAdvantages":
        """Return them, given verl's `advantages` and `response_mask`, both (B, T).

        A row without trained tokens gets the advantage 0.
        """
        trained_B = count_tokens(tensors["response_mask"])
        total_B = _sum_over_trained(tensors["advantages"], tensors["response_mask"])
        advantage_B = total_B / trained_B.clamp(min=1)
        return cls(trained_B.cpu().numpy(), advantage_B.cpu().numpy())


def _sum_over_trained(advantages_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the sum of the advantages over the trained tokens of each row, (B,) float64."""
    totals = []
    advantages = torch.split(advantages_BT, ROWS_AT_ONCE)
    masks = torch.split(mask_BT, ROWS_AT_ONCE)
    for advantages_RT, mask_RT in zip(advantages, masks, strict=True):
        # What stands at other tokens means nothing, and may be NaN.
        trained_RT = torch.where(mask_RT != 0, advantages_RT, 0.0)
        # A sum of thousands of tokens in float32 would lose digits.
        totals.append(trained_RT.sum(dim=1, dtype=torch.float64))
    return torch.cat(totals)


@dataclass(eq=False)
class AdvantageStep:
    """One batch on its way from rows to advantages."""

    settings: GdpoSettings  # as they were checked when the run started
    rows: BatchRows
    scalars: GdpoScalars | None = None  # None: another estimator than gdpo ran
    advantages: TokenAdvantages | None = None
    _token: "Token[AdvantageStep | None] | None" = field(default=None, repr=False)

    def __enter__(self) -> "AdvantageStep":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)

    def check(self, adv_estimator: str) -> None:
        """Raise RewardError for what the batch must not train on, whichever estimator runs.

        It drops samples too. See `RewardMatrix.of`, `RewardMatrix.check_own_scores` and
        `conditions.py`.
        """
        self._drop_failed_samples()
        self._refuse_paid_failures(adv_estimator)
        # Only gdpo trains on named rewards alone, and takes no notice of an agent loop's own score.
        if adv_estimator != "gdpo":
            self.rewards.check_own_scores(self.rows)

    def _drop_failed_samples(self) -> None:
        """Make padding of what `on_error: drop` drops; raise RewardError if too many have failed.

        This comes before the first look at the rewards, which dropped samples are no part of.
        """
        # Lists of functions leave notes, and tasks whose scorer fills them in.
        if NOTES_KEY not in self.rows.columns:
            return
        self.rows = drop_failed(self.rows, self.settings.min_group)
        refuse_failures(self.rows.notes, self.settings.max_failed, f"of step {self.rows.step}")

    def _refuse_paid_failures(self, adv_estimator: str) -> None:
        """Raise RewardError, or warn once, where failing the condition of a reward is better.

        Bounds may not have told it when the run started.
        """
        raw = self.rewards.raw
        assert raw is not None  # it was made of the rows
        is_summed = sums_first(adv_estimator, self.settings)
        for paid in paid_in_batch(raw, self.rows, self.settings, is_summed=is_summed):
            if paid.is_default:
                raise RewardError(paid.message)
            warn_once(paid)

    @functools.cached_property
    def rewards(self) -> RewardMatrix:
        """The reward matrix, made once for the estimator and the metrics; see `RewardMatrix.of`."""
        rewards = RewardMatrix.of(self.rows, self.settings)
        _log_rewards_in_use(rewards, self.rows, self.settings)
        _log_lacking_rewards(rewards, self.rows.step)
        return rewards

    @property
    def keys(self) -> list[str]:
        """`{uid}_{session}_{index}` of each row."""
        return [str(key) for key in self.rows.keys]

    @property
    def computed(self) -> TokenAdvantages:
        """The advantages.

        Raises:
            RuntimeError: the trainer does not compute advantages with verl's function.
        """
        if self.advantages is None:
            raise RuntimeError(
                "verl-gdpo: this trainer's _compute_advantage did not call verl's "
                "compute_advantage_for_multi_trajectories. The dump and batch_norm=token "
                "get from it which tokens are trained. Let _compute_advantage call that function, "
                "or set trainer.rollout_data_dir=null and another algorithm.gdpo.batch_norm"
            )
        return self.advantages

    def metrics(
        self, adv_estimator: str, length_B: Sequence[int], *, by_source: bool
    ) -> dict[str, float]:
        """Return the metrics of the step, whose advantages are computed; see `batch_metrics`.

        Args:
            adv_estimator: `algorithm.adv_estimator`.
            length_B: the length of each row's response in tokens.
            by_source: whether rewards are also told by data source.
        """
        rows = self.rows
        tokens_B = np.array(length_B)
        if adv_estimator == "gdpo" and self.settings.batch_norm == "token":
            # Rollout correction has changed the masks, and the estimator counts what is trained.
            tokens_B = self.computed.trained_B
        sources = None
        if by_source:
            sources = rows.sources

        of_batch = batch_metrics(
            self.rewards,
            rows.counted_B,
            rows.uids,
            rows.over_sessions(tokens_B),
            settings_of_advantage(adv_estimator, self.settings),
            self.settings.bounds,
            sources,
            self.scalars,
        )
        return of_batch | scoring_metrics(rows) | rollout_metrics(rows, np.array(length_B))


_current: ContextVar[AdvantageStep | None] = ContextVar("verl_gdpo_step", default=None)


def current_step() -> AdvantageStep | None:
    """Return the step that a trainer has opened in this context, or None."""
    return _current.get()


# --- what the log says of rewards, once in a process ----------------------------------------------

_logged: set[tuple[str, ...]] = set()  # names of rewards that were in use together
_had: set[str] = set()  # rewards that some sample of a step had
_lacked: set[str] = set()  # those of which the log says that a step had none


def _log_rewards_in_use(rewards: RewardMatrix, rows: BatchRows, settings: GdpoSettings) -> None:
    """Log the rewards in use with their weights, and what was returned beside them."""
    names = tuple(rewards.weights)
    # Looking through all columns at each step would take time.
    if names in _logged:
        return
    _logged.add(names)

    in_use = ", ".join(f"{name} {weight:g}" for name, weight in rewards.weights.items())
    which = ""
    if not settings.rewards:
        which = " (all numbers that are returned)"
    others = [name for name in rewards_among(rows.columns) if name not in names]
    unused = ""
    if others:
        unused = f"; returned, and not used: {', '.join(others)}"
    logger.info("verl-gdpo: rewards in use, with weights%s: %s%s", which, in_use, unused)


def _log_lacking_rewards(rewards: RewardMatrix, step: int | None) -> None:
    """Log that no sample of a step has a reward. The others train as ever."""
    there = set()
    weighed = set()
    for k, (name, weight) in enumerate(rewards.weights.items()):
        if rewards.present_BK[:, k].any():
            there.add(name)
        if weight != 0:
            weighed.add(name)
    # A schedule may have taken the weight of a reward that an earlier step had.
    lacking = (weighed | _had) - there
    for name in sorted(lacking - _lacked):
        _lacked.add(name)
        logger.info("verl-gdpo: no sample of step %s has the reward %r", step, name)
    _had.update(there & weighed)
