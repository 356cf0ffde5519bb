"""Converts values that a scorer returned into rewards, or into values for dumps and metrics.

A scorer may return anything, such as a set, bytes, an array or NaN. Such a value is an error if it
is a reward. If it is only logged, it must not end the run.
"""

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

# types that float() accepts, although they are text
TEXT = (str, bytes, bytearray, memoryview)
LONGEST = 10_000  # a dump keeps this many characters of a value


def value_or_error(value: Any) -> float | None:
    """Return a Python, numpy or torch number (or bool) as a finite float. None stays None.

    Raises:
        ValueError: the value is not a finite number; the message continues "reward NAME ...".
    """
    if value is None:
        return None
    if isinstance(value, TEXT):
        raise ValueError(f"is {reprlib.repr(value)}; expected a finite number")
    try:
        number = float(value)
    except OverflowError:  # the value is an int that is too large for a float
        number = np.inf
    except Exception:  # the __float__ of a foreign class may raise anything
        raise ValueError(f"is a {type(value).__name__}; expected a finite number") from None
    if not np.isfinite(number):
        raise ValueError(f"is {number}; expected a finite number (None if it does not apply)")
    return number


def is_number(value: Any) -> bool:
    """Return whether a value can be meant as a reward: any number, but not text, None or a list."""
    if value is None or isinstance(value, TEXT):
        return False
    try:
        float(value)
    except OverflowError:
        return True
    except Exception:
        return False
    return True


def as_json(value: Any) -> Any:
    """Return the value itself if JSON can hold it, else as a number, else as text (`as_text`)."""
    if value is None or (type(value) is float and math.isfinite(value)):
        return value  # fast path for almost all values
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # verl writes UTF-8, which cannot hold a lone surrogate
        if len(text) <= LONGEST:
            return value
    except Exception:  # a foreign object may raise anything
        try:
            return value_or_error(value)
        except Exception:
            pass
    return as_text(value)


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
    try:
        return [None if value is None else _number(value) for value in column]
    except Exception:
        return [None if value is None else as_text(value) for value in column]


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError("text, even if it reads like a number")
    return float(value)
