"""What a scorer may return: the names of rewards and of other values, and each value by itself.

A scorer may return anything, such as a set, bytes, an array or NaN. Such a value is an error if it
is a reward. If it is only logged, it must not end the run.
"""

import json
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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

    >>> import numpy as np
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
