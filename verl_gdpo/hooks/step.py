"""What our parts know of one step, and the function that verl calls for `adv_estimator=gdpo`.

verl calls the estimator with tensors, and the code around it with metrics, so nothing of ours fits
between them: the step is the only state that verl does not pass along for us. A trainer opens an
`AdvantageStep` with `with`. The estimator adds `scalars`, the function around verl's adds
`advantages`, and the trainer then makes metrics and dump columns of both.

Relies on verl 0.9: verl calls estimators with the keywords `token_level_rewards, response_mask,
index, config`, and "gdpo" also with `non_tensor_batch, batch`.
"""

import functools
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from verl_gdpo.algorithm.conditions import paid_in_batch
from verl_gdpo.algorithm.equation import GdpoScalars, spread_over_tokens
from verl_gdpo.algorithm.failed_samples import drop_failed, refuse_failures
from verl_gdpo.algorithm.matrix import RewardMatrix, rewards_among, scalars_of
from verl_gdpo.algorithm.metrics import (
    batch_metrics,
    scoring_metrics,
    settings_of_advantage,
    small_ranges,
)
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.rows import BatchRows
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.algorithm.values import NOTES_KEY, RewardError, as_json
from verl_gdpo.hooks.configuration import KL_IN_REWARD, sums_first, warn_once
from verl_gdpo.hooks.extend import Function, load, record_of

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)

# the message for a trainer that passes no rewards; all trainers extended by us pass them
NO_REWARDS = (
    "gdpo: no rewards reached the estimator. verl-gdpo extends the trainers that are derived from "
    "verl's PPOTrainer or from its legacy trainer. One that calls verl's compute_advantage itself "
    "has to pass each reward as a column of data.non_tensor_batch. Their names go into "
    'data.meta_info["reward_extra_keys"] or algorithm.gdpo.rewards'
)


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
        is_trained_BT = tensors["response_mask"] != 0
        trained_B = is_trained_BT.sum(dim=1)
        advantages_BT = torch.where(is_trained_BT, tensors["advantages"], 0.0)
        total_B = advantages_BT.sum(dim=1, dtype=torch.float64)
        advantage_B = total_B / trained_B.clamp(min=1)
        return cls(trained_B.cpu().numpy(), advantage_B.cpu().numpy())


@dataclass(eq=False)
class AdvantageStep:
    """One batch on its way from rows to advantages."""

    settings: GdpoSettings  # as they were checked when the run started
    rows: BatchRows
    scalars: GdpoScalars | None = None  # None: another estimator than gdpo ran
    advantages: TokenAdvantages | None = None
    _token: "Token[AdvantageStep | None] | None" = field(default=None, repr=False)

    @functools.cached_property
    def rewards(self) -> RewardMatrix:
        """The reward matrix, made once for the estimator and the metrics; see `RewardMatrix.of`."""
        rewards = RewardMatrix.of(self.rows, self.settings)
        names = tuple(rewards.weights)
        if names not in _logged:  # looking through all columns at each step would take time
            _logged.add(names)
            in_use = ", ".join(f"{name} {weight:g}" for name, weight in rewards.weights.items())
            all_ = "" if self.settings.rewards else " (all numbers that are returned)"
            others = [name for name in rewards_among(self.rows.columns) if name not in names]
            unused = f"; returned, and not used: {', '.join(others)}" if others else ""
            logger.info("verl-gdpo: rewards in use, with weights%s: %s%s", all_, in_use, unused)
        _say_what_is_lacking(rewards, self.rows.step)
        return rewards

    def check(self, adv_estimator: str) -> None:
        """Raise RewardError for what the batch must not train on, whichever estimator runs.

        It drops samples too. See `RewardMatrix.of`, `RewardMatrix.check_own_scores` and
        `conditions.py`.
        """
        if NOTES_KEY in self.rows.columns:
            self.rows = drop_failed(self.rows, self.settings.min_group)
            refuse_failures(self.rows.notes, self.settings.max_failed, f"of step {self.rows.step}")
        self._refuse_paid_failures(adv_estimator)
        if adv_estimator != "gdpo":
            self.rewards.check_own_scores(self.rows)

    def _refuse_paid_failures(self, adv_estimator: str) -> None:
        """Raise RewardError, or warn once, where failing the condition of a reward pays.

        Bounds may not have told it when the run started.
        """
        raw, settings = self.rewards.raw, self.settings
        assert raw is not None  # it was made of the rows
        is_summed = sums_first(adv_estimator, settings)
        for paid in paid_in_batch(raw, self.rows, settings, is_summed=is_summed):
            if paid.is_default:
                raise RewardError(paid.message)
            warn_once(paid)

    @property
    def computed(self) -> TokenAdvantages:
        """The advantages.

        Raises:
            RuntimeError: the trainer does not compute advantages with verl's function.
        """
        if self.advantages is None:
            raise RuntimeError(
                "verl-gdpo: this trainer's _compute_advantage did not call verl's "
                "compute_advantage_for_multi_trajectories. The rollout dump and batch_norm=token "
                "get from it which tokens are trained. Let _compute_advantage call that function, "
                "or set trainer.rollout_data_dir=null and another algorithm.gdpo.batch_norm"
            )
        return self.advantages

    @property
    def keys(self) -> list[str]:
        """`{uid}_{session}_{index}` of each row."""
        return [str(key) for key in self.rows.keys]

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
        counted_B = rows.counted_B
        uids = rows.uids
        tokens_of_session_B = rows.over_sessions(tokens_B)
        of_scoring = scoring_metrics(rows)
        of_batch = batch_metrics(
            self.rewards,
            counted_B,
            uids,
            tokens_of_session_B,
            settings_of_advantage(adv_estimator, self.settings),
            self.settings.bounds,
            rows.sources if by_source else None,
            self.scalars,
        )
        return of_batch | of_scoring

    def __enter__(self) -> "AdvantageStep":
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _current.reset(self._token)


_current: ContextVar[AdvantageStep | None] = ContextVar("verl_gdpo_step", default=None)
# the legacy trainer whose `fit` runs in this context; verl's `compute_advantage` does not know it
fitting: ContextVar[Any] = ContextVar("verl_gdpo_legacy_trainer", default=None)


def current_step() -> AdvantageStep | None:
    """Return the step that a trainer has opened in this context, or None."""
    return _current.get()


_logged: set[tuple[str, ...]] = set()  # sets of rewards
_compared: set[tuple[str, ...]] = set()  # those whose ranges were compared


_had: set[str] = set()  # rewards that some sample of a step had
_lacked: set[str] = set()  # those of which the log says that a step had none


def _say_what_is_lacking(rewards: RewardMatrix, step: int | None) -> None:
    """Log, once for each reward, that no sample of a step has it. The others train as ever."""
    there = {name for k, name in enumerate(rewards.weights) if rewards.present_BK[:, k].any()}
    weighed = {name for name, weight in rewards.weights.items() if weight != 0}
    for name in sorted((weighed | _had) - there - _lacked):
        _lacked.add(name)
        logger.info("verl-gdpo: no sample of step %s has the reward %r", step, name)
    _had.update(there & weighed)


class DumpBatch(NamedTuple):
    """A batch whose advantages are computed, for the dump of its step."""

    number: int  # Its place among the batches of the step.
    rows: BatchRows
    advantages: TokenAdvantages
    response_length_B: Sequence[int]

    def columns_of_rows(self) -> dict[str, dict[str, Any]]:
        """Return {key: {column: value}} of its rows."""
        columns_of = {}
        for row, key in enumerate(self.rows.keys):
            rewards = {}
            for name, value in self.rows.extra_info(row).items():
                if name not in ("score", NOTES_KEY):
                    rewards[str(name)] = as_json(value, str(name))
            columns_of[str(key)] = {
                "group": key.uid,
                "session": key.session,
                "data_source": self.rows.sources[row],
                "response_tokens": self.response_length_B[row],
                "trained_tokens": int(self.advantages.trained_B[row]),
                "rewards": rewards,
                "advantage": float(self.advantages.advantage_B[row]),
                "batch": self.number,
                "is_padding": bool(self.rows.is_padding_B[row]),
            }
        return columns_of


class DumpRows:
    """Keeps the batches of a step until the next one. A step may have several, and several dumps.

    Some trainers dump few steps, so a batch is made columns when a dump first asks.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._batch_count = 0
        self._not_yet_asked_for: list[DumpBatch] = []
        self._columns_of: dict[str, dict[str, Any]] = {}  # {key: {column: value}}

    def add(self, response_length_B: Sequence[int], step: AdvantageStep) -> None:
        """Keep a batch.

        Args:
            response_length_B: the length of each response in tokens.
            step: of these rows, in the same order, with its advantages.
        """
        advantages = step.computed
        if step.rows.step != self._step:
            self._step = step.rows.step
            self._batch_count = 0
            self._not_yet_asked_for.clear()
            self._columns_of.clear()
        batch = DumpBatch(self._batch_count, step.rows, advantages, response_length_B)
        self._not_yet_asked_for.append(batch)
        self._batch_count += 1

    def columns(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Return {name: values in the order of `keys`}.

        Raises:
            RuntimeError: a key is in no batch.
        """
        for batch in self._not_yet_asked_for:
            self._columns_of |= batch.columns_of_rows()
        self._not_yet_asked_for.clear()
        unknown = [key for key in keys if key not in self._columns_of]
        if unknown:
            raise RuntimeError(
                f"rollout dump: {len(unknown)} of {len(keys)} rows were in no batch with computed "
                f"advantages, such as {unknown[0]}. verl-gdpo expects verl's "
                "_compute_advantage to run before _log_rollout_data, on the same rows; a trainer "
                "of your own that does otherwise works with trainer.rollout_data_dir=null"
            )
        names = next(iter(self._columns_of.values()), {})
        return {name: [self._columns_of[key][name] for key in keys] for name in names}


# --- what verl calls ----------------------------------------------------------------------------


def compute_in_step(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Stay out of the way of a V1 trainer, which has opened a step."""
    if current_step() is not None:
        return original(*args, **kwargs)
    return load("verl_gdpo.hooks.legacy:compute_in_step")(original, *args, **kwargs)


def compute_gdpo(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    config: Any,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **_verl_extras: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages_BT, returns_BT), which are equal for an outcome reward.

    Args:
        token_level_rewards: (B, T) the summed reward. It is not used, because GDPO needs each
            reward by itself.
        response_mask: (B, T) 1 on trained tokens, 0 elsewhere.
        index: (B,) group ids, which are verl's prompt uids.
        config: verl's `algorithm` block.
        non_tensor_batch: the reward columns, if a trainer of the user calls verl's function.

    Raises:
        RewardError: a row lacks a reward; see `RewardMatrix.of` and `scalars_of`.
        ValueError: `config` asks for a KL penalty in the reward.
    """
    if config and config.get("use_kl_in_reward", False):
        raise ValueError(KL_IN_REWARD)
    step = current_step()
    if step is None:
        record = record_of(fitting.get())
        settings = record.settings if record else read_settings(config or {})
        rows = _rows_of(settings, non_tensor_batch or {}, index)
        step = AdvantageStep(settings, rows)
        step.check("gdpo")
    rows, settings = step.rows, step.settings
    if len(rows) != len(response_mask):
        raise RuntimeError(
            f"gdpo: got {len(response_mask)} rows, but the rewards of {len(rows)} rows"
        )
    token_count_B = None
    if settings.batch_norm == "token":
        trained_B = (response_mask != 0).sum(dim=1).cpu().numpy()
        token_count_B = torch.from_numpy(rows.over_sessions(trained_B))
    step.scalars = scalars_of(step.rewards, rows.counted_B, index, settings, token_count_B)
    if (names := tuple(step.rewards.weights)) not in _compared:
        _compared.add(names)
        for line in small_ranges(step.rewards, settings):
            logger.info("verl-gdpo: %s", line)
    # every row of a session gets the advantage of its last row; padding keeps 0
    A_B = step.scalars.A_B[torch.from_numpy(rows.session_B)]
    advantages_BT = spread_over_tokens(A_B, response_mask)
    return advantages_BT, advantages_BT


def _rows_of(settings: GdpoSettings, batch: Mapping[str, Any], uids: Any) -> BatchRows:
    columns = {name: batch[name] for name in settings.names if name in batch}
    if not columns:
        raise RewardError(NO_REWARDS)
    return BatchRows.from_columns(columns, uids)
