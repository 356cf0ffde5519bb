"""The rows of a batch: what verl's reward manager returned for each, its key, and its label.

verl's trainers know rows by key, and the advantage knows only numbers. This module connects them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_gdpo.algorithm.values import (
    AGENT_SCORE_KEY,
    ERROR_KEY,
    OF_AGENT_LOOPS,
    ROLLOUT_KEY,
    SCORER,
    RewardError,
)

# marks a row that lacks the key of a column; None means that the reward does not apply
ABSENT = object()


@dataclass(frozen=True, slots=True)
class RowKey:
    """Which row it is: the only place where what identifies a row is read from text."""

    uid: str  # of the prompt; samples of one prompt share it, and are a group
    session: int  # the number of the sample in its group
    index: int  # the number of the row in its session

    @classmethod
    def of_text(cls, key: str) -> "RowKey":
        """Read a key of verl's V1 trainers, `{uid}_{session}_{index}`; a uid may hold underscores.

        Raises:
            ValueError: the text is no such key.
        """
        try:
            uid, session, index = key.rsplit("_", 2)
            return cls(uid, int(session), int(index))
        except ValueError:
            raise ValueError(f"key {key!r}: expected UID_SESSION_INDEX, as V1 writes it") from None

    @classmethod
    def of_uids(cls, uids: Iterable[Any]) -> list["RowKey"]:
        """Return a key for each row of a trainer that knows uids alone: a row is a session."""
        sessions: Counter[str] = Counter()
        keys = []
        for uid in map(str, uids):
            keys.append(cls(uid, sessions[uid], 0))
            sessions[uid] += 1
        return keys

    def __str__(self) -> str:
        return f"{self.uid}_{self.session}_{self.index}"


@dataclass(frozen=True)
class BatchRows:
    """The B rows of one batch, in the estimator's order.

    A session is one rollout. An agent loop may split it into several rows, which share one reward.
    Only the last row of a session is counted.
    """

    keys: Sequence[RowKey]
    labels: Sequence[str]  # the name of each row in messages: for people, and read by no code
    columns: Mapping[str, Sequence[Any]]  # verl's reward_extra_info by key, ABSENT where not there
    sources: Sequence[str]  # verl's data_source; rows of one source have the same rewards
    session_B: npt.NDArray[np.int64]  # the number of the last row in each row's session
    is_padding_B: npt.NDArray[np.bool_]  # verl's padding, and what `drop_failed` took out
    step: int | None = None  # the training step, which weights with a schedule need
    # {row: score} where no manager ran, because an agent loop set `reward_score` itself
    own_scores: Mapping[int, float] = field(default_factory=dict)
    notes: Sequence[Mapping[str, float]] = ()  # see `drop_failed`
    # {row: what its rollout took}: the keys `generated_tokens` and `tool_seconds`
    rollouts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @classmethod
    def from_keys(
        cls,
        keys: Sequence[str],
        infos: Sequence[Mapping[str, Any]],
        sources: Sequence[str],
        is_padding: Sequence[bool],
        step: int | None = None,
    ) -> "BatchRows":
        """Make rows from verl's TransferQueue, which uses keys `{uid}_{session}_{index}`."""
        row_keys = [RowKey.of_text(key) for key in keys]
        return cls.of(row_keys, keys, infos, sources, is_padding, step)

    @classmethod
    def of(
        cls,
        keys: Sequence[RowKey],
        labels: Sequence[str],
        infos: Sequence[Mapping[str, Any]],
        sources: Sequence[str],
        is_padding: Sequence[bool],
        step: int | None = None,
    ) -> "BatchRows":
        """Make rows of verl's reward_extra_info of each."""
        own_scores = {}
        rollouts = {}
        for row, info in enumerate(infos):
            if AGENT_SCORE_KEY in info:
                own_scores[row] = info[AGENT_SCORE_KEY]
            if ROLLOUT_KEY in info:
                rollouts[row] = info[ROLLOUT_KEY]
        return cls(
            keys=keys,
            labels=labels,
            columns=columns_of(infos),
            sources=sources,
            session_B=_last_row_of_session(keys),
            is_padding_B=np.array(is_padding, dtype=np.bool_),
            step=step,
            own_scores=own_scores,
            rollouts=rollouts,
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]], uids: Sequence[Any]) -> "BatchRows":
        """Make rows from a DataProto (legacy trainer): no padding, one row per session.

        They all get one data source here, so they must have the same columns.

        Args:
            uids: of each row; samples of one prompt share one.
        """
        size = len(uids)
        lists = {}
        for name, column in columns.items():
            # `tolist` makes Python's own numbers of numpy's, which messages show without a class.
            lists[name] = column.tolist() if isinstance(column, np.ndarray) else column
        return cls(
            keys=RowKey.of_uids(uids),
            labels=[f"row {row}" for row in range(size)],
            columns=lists,
            sources=[""] * size,
            session_B=np.arange(size),
            is_padding_B=np.zeros(size, dtype=np.bool_),
        )

    def __len__(self) -> int:
        return len(self.session_B)

    def label(self, row: int) -> str:
        """Return the name of a row for messages."""
        return self.labels[row]

    @property
    def uids(self) -> list[str]:
        """The prompt of each row."""
        return [key.uid for key in self.keys]

    def extra_info(self, row: int) -> dict[str, Any]:
        """Return verl's reward_extra_info of one row."""
        info = {}
        for name, column in self.columns.items():
            if column[row] is not ABSENT:
                info[name] = column[row]
        return info

    def origin_of(self, row: int) -> str:
        """Return who returned the `extra_info` of a row, for messages that continue with it."""
        if row not in self.own_scores:
            return SCORER
        return (
            f"the agent loop set reward_score={self.own_scores[row]:g} itself, so no reward manager"
            ' ran, and extra_fields["reward_extra_info"], which takes {name: reward}, holds'
        )

    @property
    def counted_B(self) -> npt.NDArray[np.bool_]:
        """True for the rows that every statistic counts: the last row of each real session."""
        stands_for_itself_B: npt.NDArray[np.bool_] = self.session_B == np.arange(len(self))
        return stands_for_itself_B & ~self.is_padding_B

    @property
    def samples(self) -> list[int]:
        """The numbers of the rows that are counted."""
        numbers: list[int] = np.flatnonzero(self.counted_B).tolist()
        return numbers

    def over_sessions(self, count_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sum of a count over the rows of each session, in its last row; else 0."""
        return np.bincount(self.session_B, count_B, minlength=len(self)).astype(np.int64)

    def raise_on_error(self) -> None:
        """Raise RewardError if the reward manager could not score a sample."""
        if ERROR_KEY not in self.columns:
            return
        errors = []
        for error, is_padding in zip(self.columns[ERROR_KEY], self.is_padding_B, strict=True):
            # Padding is a copy of another row, with its error.
            if error is not ABSENT and not is_padding:
                errors.append(error)
        if errors:
            raise RewardError(
                f"{len(errors)} of {len(self)} samples could not be scored. The first: {errors[0]}"
            )


def columns_of(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the reward_extra_info of each row as columns, with ABSENT where a row lacks a key."""
    names: dict[str, None] = {}  # a set that keeps the order
    for info in infos:
        names.update(dict.fromkeys(info))
    # These are no values of a scorer: they stand in `own_scores` and `rollouts`.
    for name in OF_AGENT_LOOPS:
        names.pop(name, None)
    return {name: [info.get(name, ABSENT) for info in infos] for name in names}


def _last_row_of_session(keys: Sequence[RowKey]) -> npt.NDArray[np.int64]:
    """Return for each row the number of the last row of its session, (B,)."""
    last: dict[tuple[str, int], int] = {}
    for row, key in enumerate(keys):
        session = (key.uid, key.session)
        # verl may hand over the rows of a session in any order.
        if session not in last or key.index > keys[last[session]].index:
            last[session] = row
    return np.array([last[key.uid, key.session] for key in keys], dtype=np.int64)
