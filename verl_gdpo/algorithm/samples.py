"""What the reward manager returned for each row of a batch, and each value of it.

verl's trainers know rows by key, and the advantage knows only numbers. This module connects them. A
scorer may return anything, such as a set, bytes, an array or NaN. Such a value is an error if it is
a reward. If it is only logged, it must not end the run.
"""

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

# key in verl's reward_extra_info that holds why the reward manager could not score the sample
ERROR_KEY = "gdpo_error"
# key there that holds what a scorer notes of its own work, {name: number}; it is logged, no reward
NOTES_KEY = "gdpo_notes"
FAILED = "failed_"  # how a note begins that a function of the list could not score the sample
DROPPED = "dropped"  # the note that a sample leaves all statistics and the loss
# key there that holds the score that an agent loop set itself; verl then asks no reward manager
AGENT_SCORE_KEY = "gdpo_own_score"
RUBRIC_KEY = "gdpo_rubric_"  # before a reward's name there: {criterion: [value or None, weight]}
SCORER = "the scorer returned"  # how messages begin that continue with what it returned
# marks a row that lacks the key of a column; None means that the reward does not apply
ABSENT = object()
# types that float() accepts, although they are text
TEXT_TYPES = (str, bytes, bytearray, memoryview)
# No reward or weight may be larger: verl keeps scores in float32, whose largest number is 3.4e38.
# In float64, squares from 1e154 on are infinite, so that a reward would be divided to 0.
LARGEST = 1e38
LONGEST = 10_000  # a dump keeps this many characters of a value

# A reward, or another value that is returned with it, would take the place of what verl's trainers,
# or we, keep under these names.
RESERVED_NAMES = {
    **dict.fromkeys([ERROR_KEY, NOTES_KEY, AGENT_SCORE_KEY, "gdpo_keys"], "verl-gdpo's own"),
    **dict.fromkeys(["reward", "acc_success_only"], "a metric of verl's validation"),
    **dict.fromkeys(["input", "output", "gts", "step", "uid"], "a column of verl's dumps"),
    **dict.fromkeys(
        ["data_source", "reward_model", "reward_extra_info", "multi_modal_inputs", "__num_turns__"],
        "a column of verl's batches",
    ),
}
# what verl says of a rollout; it is a reward only if the configuration says so
ROLLOUT_FACTS = ("num_turns", "min_global_steps", "max_global_steps", "num_cached_tokens")


class RewardError(RuntimeError):
    """A sample has no usable reward, so the run must stop."""


@dataclass(frozen=True)
class RowNames:
    """The names that rewards of rows of one data source have in the settings.

    wanted: all names of the settings.
    renames: (a wanted name, another name of the same reward), in the order of preference.
    belongs_elsewhere: whether rows of another task may have a reward that these rows lack. Such a
        reward does not apply: it is None.
    """

    wanted: Sequence[str]
    renames: Sequence[tuple[str, str]]
    belongs_elsewhere: Callable[[str], bool]

    def named(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a scorer returned for a row, under these names."""
        named = dict(info)
        for name, other in self.renames:
            if name not in named and other in named:
                named[name] = named.pop(other)
        absent = [name for name in self.wanted if name not in named]
        return {**named, **dict.fromkeys(filter(self.belongs_elsewhere, absent))}


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
        return cls.of([RowKey.of_text(key) for key in keys], keys, infos, sources, is_padding, step)

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
        last: dict[tuple[str, int], int] = {}  # {(uid, session): its last row}
        for row, key in enumerate(keys):
            known = last.get((key.uid, key.session))
            if known is None or key.index > keys[known].index:
                last[key.uid, key.session] = row
        return cls(
            keys=keys,
            labels=labels,
            columns=columns_of(infos),
            sources=sources,
            session_B=np.array([last[key.uid, key.session] for key in keys], dtype=np.int64),
            is_padding_B=np.array(is_padding, dtype=np.bool_),
            step=step,
            own_scores={
                r: info[AGENT_SCORE_KEY] for r, info in enumerate(infos) if AGENT_SCORE_KEY in info
            },
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]], uids: Sequence[Any]) -> "BatchRows":
        """Make rows from a DataProto (legacy trainer): no padding, one row per session.

        They all get one data source here, so they must have the same columns.

        Args:
            uids: of each row; samples of one prompt share one.
        """
        size = len(uids)
        return cls(
            keys=RowKey.of_uids(uids),
            labels=[f"row {row}" for row in range(size)],
            columns={
                name: column.tolist() if isinstance(column, np.ndarray) else column
                for name, column in columns.items()
            },
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
        values = {name: column[row] for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not ABSENT}

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

    def over_sessions(self, count_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the sum of a count over the rows of each session, in its last row; else 0."""
        return np.bincount(self.session_B, count_B, minlength=len(self)).astype(np.int64)

    def raise_on_error(self) -> None:
        """Raise RewardError if the reward manager could not score a sample."""
        errors = zip(self.columns.get(ERROR_KEY, []), self.is_padding_B, strict=False)
        failed = [error for error, is_padding in errors if error is not ABSENT and not is_padding]
        if failed:
            raise RewardError(
                f"{len(failed)} of {len(self)} samples could not be scored. The first: {failed[0]}"
            )


def columns_of(infos: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the reward_extra_info of each row as columns, with ABSENT where a row lacks a key."""
    names = dict.fromkeys(chain.from_iterable(infos))
    names.pop(AGENT_SCORE_KEY, None)
    return {name: [info.get(name, ABSENT) for info in infos] for name in names}


def check_name(name: Any) -> Any:
    """Return a name; raise ValueError if no reward or other returned value can have it."""
    if not isinstance(name, str) or not name.strip() or "/" in name or not name.isprintable():
        raise ValueError(f"name {name!r}: expected text that can be printed, without '/'")
    if name in RESERVED_NAMES:
        raise ValueError(f"name {name!r}: it is {RESERVED_NAMES[name]}; rename it")
    if name.startswith(RUBRIC_KEY):
        raise ValueError(f"name {name!r}: {RUBRIC_KEY}* are verl-gdpo's own; rename it")
    return name


def is_internal(name: Any) -> bool:
    """Return whether a key of verl's reward_extra_info is one that we add."""
    own = (ERROR_KEY, NOTES_KEY, AGENT_SCORE_KEY)
    return name in own or (isinstance(name, str) and name.startswith(RUBRIC_KEY))


def plain_name(name: Any) -> Any:
    """Return a text as a plain str. One of a class of the user's cannot go to other processes."""
    return str.__str__(name) if isinstance(name, str) else name


def check_names(infos: Sequence[Mapping[str, Any]], label: Callable[[int], str]) -> None:
    """Raise RewardError if a key is no name for a reward or another value of a sample.

    Of our own keys, a sample that an agent loop scored has only `AGENT_SCORE_KEY`.
    """
    checked: set[Any] = set()
    for row, info in enumerate(infos):
        is_of_loop = AGENT_SCORE_KEY in info
        for name in info:
            if name in checked or name == AGENT_SCORE_KEY:
                continue
            if is_internal(name) and not is_of_loop:
                continue
            try:
                check_name(name)
            except ValueError as error:
                raise RewardError(f"{label(row)}: reward_extra_info has the {error}") from None
            checked.add(name)


def value_or_error(value: Any, what: str = "") -> float | None:
    """Return a Python, numpy or torch number (or bool) as a finite float. None stays None.

    >>> value_or_error(np.float32(0.5)), value_or_error(True), value_or_error(None)
    (0.5, 1.0, None)
    >>> value_or_error("0.5", "reward 'acc' ")
    Traceback (most recent call last):
    ValueError: reward 'acc' is '0.5'; expected a finite number. Return a float, or None

    Raises:
        ValueError: the value is not a finite number, or is too large; the message begins with
            `what`.
    """
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        kind = "" if isinstance(value, TEXT_TYPES) else f"a {type(value).__name__}, "
        got = f"{kind}{reprlib.repr(value)}"
        raise ValueError(f"{what}is {got}; expected a finite number. Return a float, or None")
    if not math.isfinite(number):
        raise ValueError(f"{what}is {number}; expected a finite number (None if it does not apply)")
    if abs(number) > LARGEST:
        raise ValueError(
            f"{what}is {number:g}; expected a number from {-LARGEST:g} to {LARGEST:g}, because "
            "verl keeps scores in float32. Return it on another scale"
        )
    return number


def is_number(value: Any) -> bool:
    """Return whether a value can be meant as a reward: any number, but not text, None or a list."""
    return value is not None and _as_float(value) is not None


def may_be_meant(value: Any) -> bool:
    """Return whether a value that is no number may be meant as one: "1.0", [1.0] or an array.

    >>> [may_be_meant(value) for value in ("1.0", "array([1.])", [1.0], "yes", [1.0, 2.0])]
    [True, True, True, False, False]
    """
    if isinstance(value, str):
        value = [value.removeprefix("array(").rstrip(")").strip("[]")]
    if not isinstance(value, Sequence) and not hasattr(value, "__array__"):
        return False  # looking into a mapping can change it
    with suppress(Exception):
        return len(value) == 1 and math.isfinite(float(value[0]))
    return False


def _as_float(value: Any) -> float | None:
    """Return a number as a float, inf if it is too large for one; None for what is no number."""
    if isinstance(value, TEXT_TYPES):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # the __float__ of a foreign class may raise anything
        return None


def as_json(value: Any, name: str = "") -> Any:
    """Return a value of plain classes that JSON can hold: itself, as a number, or as text.

    A class of the user's file is unknown in the processes that read the value, also one that JSON
    takes, such as an enumeration of texts or of whole numbers. See `as_text` for texts.
    """
    if value is None or (type(value) is float and math.isfinite(value)):
        return value  # fast path for almost all values
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # verl writes UTF-8, which cannot hold a lone surrogate
        if len(text) <= LONGEST or name.startswith(RUBRIC_KEY):
            return value if _is_plain(value) else json.loads(text)
    except Exception:  # a foreign object may raise anything
        with suppress(Exception):
            return value_or_error(value)
    return as_text(value)


def _is_plain(value: Any) -> bool:
    """Return whether a value that JSON can hold is made of Python's own classes alone."""
    if type(value) is dict:
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (type(None), bool, int, float, str)


def as_text(value: Any) -> str:
    """Return a text itself, or the `repr` of another value, cut after `LONGEST` characters."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def as_numbers_or_text(column: Sequence[Any]) -> list[float | str | None]:
    """Return numbers (also NaN) if all values are numbers, else text, which verl does not average.

    None stays None: the value does not apply.
    """
    with suppress(Exception):
        if not any(isinstance(value, TEXT_TYPES) for value in column):
            return [None if value is None else float(value) for value in column]
    return [None if value is None else as_text(value) for value in column]
