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

# What we add to verl's reward_extra_info of a sample stands there under these keys.
ERROR_KEY = "gdpo_error"  # why the reward manager could not score the sample
NOTES_KEY = "gdpo_notes"  # what a scorer notes of its own work, {name: number}; it is logged alone
AGENT_SCORE_KEY = "gdpo_own_score"  # set by an agent loop; verl then asks no reward manager
ROLLOUT_KEY = "gdpo_rollout"  # what the rollout took, {name: number}
# The text that was scored, for the dump, where it is not the one that verl decodes.
RESPONSE_KEY = "gdpo_response"
RUBRIC_KEY = "gdpo_rubric_"  # before a reward's name: {criterion: [value or None, weight]}

# Our part of verl's agent loop workers writes these, for each sample whoever has scored it.
OF_AGENT_LOOPS = (AGENT_SCORE_KEY, ROLLOUT_KEY)

# Among the notes of a sample, these have a meaning.
FAILED = "failed_"  # begins the note that a function of the list could not score the sample
DROPPED = "dropped"  # the note that a sample leaves all statistics and the loss

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
    ERROR_KEY: "verl-gdpo's own",
    NOTES_KEY: "verl-gdpo's own",
    AGENT_SCORE_KEY: "verl-gdpo's own",
    ROLLOUT_KEY: "verl-gdpo's own",
    RESPONSE_KEY: "verl-gdpo's own",
    "gdpo_keys": "verl-gdpo's own",
    "reward": "a metric of verl's validation",
    "acc_success_only": "a metric of verl's validation",
    "input": "a column of verl's dumps",
    "output": "a column of verl's dumps",
    "gts": "a column of verl's dumps",
    "step": "a column of verl's dumps",
    "uid": "a column of verl's dumps",
    "data_source": "a column of verl's batches",
    "reward_model": "a column of verl's batches",
    "reward_extra_info": "a column of verl's batches",
    "multi_modal_inputs": "a column of verl's batches",
    "__num_turns__": "a column of verl's batches",
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
        for name in self.wanted:
            if name not in named and self.belongs_elsewhere(name):
                named[name] = None
        return named


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
    if name in (ERROR_KEY, NOTES_KEY, *OF_AGENT_LOOPS, RESPONSE_KEY):
        return True
    return isinstance(name, str) and name.startswith(RUBRIC_KEY)


def plain_name(name: Any) -> Any:
    """Return a text as a plain str. One of a class of the user's cannot go to other processes."""
    if isinstance(name, str):
        # `str(name)` would ask the class, which may return something else, as an enumeration does.
        return str.__str__(name)
    return name


def check_names(infos: Sequence[Mapping[str, Any]], label: Callable[[int], str]) -> None:
    """Raise RewardError if a key is no name for a reward or another value of a sample.

    Of our own keys, a sample that an agent loop scored has only `OF_AGENT_LOOPS`.
    """
    # Almost all samples have the same names, and each is looked at once.
    checked: set[Any] = set()
    for row, info in enumerate(infos):
        is_of_loop = AGENT_SCORE_KEY in info
        for name in info:
            if name in checked or name in OF_AGENT_LOOPS:
                continue
            # Our reward manager has written our own keys; an agent loop may not.
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
    number = as_float(value)
    if number is None:
        got = reprlib.repr(value)
        if not isinstance(value, TEXT_TYPES):
            got = f"a {type(value).__name__}, {got}"
        raise ValueError(f"{what}is {got}; expected a finite number. Return a float, or None")
    if not math.isfinite(number):
        raise ValueError(f"{what}is {number}; expected a finite number (None if it does not apply)")
    if abs(number) > LARGEST:
        raise ValueError(
            f"{what}is {number:g}; expected a number from {-LARGEST:g} to {LARGEST:g}, because "
            "verl keeps scores in float32. Return it on another scale"
        )
    return number


def as_float(value: Any) -> float | None:
    """Return a number as a float, inf if it is too large for one; None for what is no number."""
    if isinstance(value, TEXT_TYPES):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except Exception:  # the __float__ of a foreign class may raise anything
        return None


def is_number(value: Any) -> bool:
    """Return whether a value can be meant as a reward: any number, but not text, None or a list."""
    return as_float(value) is not None


def may_be_meant(value: Any) -> bool:
    """Return whether a value that is no number may be meant as one: "1.0", [1.0] or an array.

    >>> [may_be_meant(value) for value in ("1.0", "array([1.])", [1.0], "yes", [1.0, 2.0])]
    [True, True, True, False, False]
    """
    if isinstance(value, str):
        # The repr of an array is what is left of one that was made JSON.
        inner = value.removeprefix("array(").rstrip(")")
        return _is_finite_text_or_number(inner.strip("[]"))
    # Looking into a mapping can change it, as with a defaultdict.
    if not isinstance(value, Sequence) and not hasattr(value, "__array__"):
        return False
    with suppress(Exception):
        return len(value) == 1 and _is_finite_text_or_number(value[0])
    return False


def _is_finite_text_or_number(value: Any) -> bool:
    """Return whether `float` makes a finite number of a value, also of text."""
    try:
        return math.isfinite(float(value))
    except Exception:  # the __float__ of a foreign class may raise anything
        return False


def as_json(value: Any, name: str = "") -> Any:
    """Return a value of plain classes that JSON can hold: itself, as a number, or as text.

    A class of the user's file is unknown in the processes that read the value, also one that JSON
    takes, such as an enumeration of texts or of whole numbers. See `as_text` for texts.

    Args:
        name: of the value; the criteria of a rubric are not cut, however long they are.
    """
    if value is None:
        return None
    # fast path for almost all values
    if type(value) is float and math.isfinite(value):
        return value
    text = _json_or_none(value)
    if text is None:
        # numpy's numbers, tensors and fractions are no JSON
        try:
            return value_or_error(value)
        except Exception:  # a foreign object may raise anything
            return as_text(value)
    if len(text) > LONGEST and not name.startswith(RUBRIC_KEY):
        return as_text(value)
    if _is_plain(value):
        return value
    return json.loads(text)


def _json_or_none(value: Any) -> str | None:
    """Return a value as JSON that a file in UTF-8 can hold; None if that is not possible."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # verl writes UTF-8, which cannot hold a lone surrogate
    except Exception:  # a foreign object may raise anything
        return None
    return text


def _is_plain(value: Any) -> bool:
    """Return whether a value that JSON can hold is made of Python's own classes alone."""
    if type(value) is dict:
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in (type(None), bool, int, float, str)


def as_text(value: Any) -> str:
    """Return a text itself, or the `repr` of another value, cut after `LONGEST` characters."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:  # a foreign object may raise anything
        return f"<{type(value).__name__} without a repr>"
    # UTF-8 cannot hold a lone surrogate.
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... ({len(text)} characters)"


def as_numbers_or_text(column: Sequence[Any]) -> list[float | str | None]:
    """Return numbers (also NaN) if all values are numbers, else text, which verl does not average.

    None stays None: the value does not apply.
    """
    numbers = _floats_or_none(column)
    if numbers is not None:
        return numbers
    return [None if value is None else as_text(value) for value in column]


def _floats_or_none(column: Sequence[Any]) -> list[float | str | None] | None:
    """Return the values as floats, and None where there is none; None if one is no number."""
    numbers: list[float | str | None] = []
    for value in column:
        if value is None:
            numbers.append(None)
            continue
        # `float` would take text for a number.
        if isinstance(value, TEXT_TYPES):
            return None
        try:
            numbers.append(float(value))
        except Exception:  # the __float__ of a foreign class may raise anything
            return None
    return numbers
