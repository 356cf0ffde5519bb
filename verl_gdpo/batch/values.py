"""One value that a scorer returned: as a reward, or as something that a dump or a metric can hold.

It may be anything: a set, bytes, an array, NaN. As a reward that is an error; beside the rewards it
must not end a run.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

# float() would read a number in them
TEXT = (str, bytes, bytearray, memoryview)
LONGEST = 10_000  # characters that a dump keeps of a value


def value_or_error(value: Any) -> float | None:
    """A Python, numpy or torch number (or bool) as a finite float; None, for missing, as it is.

    Raises:
        ValueError: what the value is instead.
    """
    if value is None:
        return None
    if isinstance(value, TEXT):
        raise ValueError(f"is {value!r}; expected a finite number")
    try:
        number = float(value)
    except OverflowError:  # an int that no float can hold
        number = np.inf
    except Exception:  # whatever the __float__ of a foreign class raises
        raise ValueError(f"is a {type(value).__name__}; expected a finite number") from None
    if not np.isfinite(number):
        raise ValueError(f"is {number}; expected a finite number (None if it does not apply)")
    return number


def is_number(value: Any) -> bool:
    """Whether a scorer means a reward by it: a number, finite or not, but no text, None or list."""
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
    """A value itself if JSON can hold it, else the number that it is, else text; see `as_text`."""
    if value is None or (type(value) is float and math.isfinite(value)):
        return value  # nearly always, and much faster than to try
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()  # verl writes UTF-8, which a lone surrogate is not
        if len(text) <= LONGEST:
            return value
    except Exception:  # a foreign object may raise whatever it likes
        try:
            return value_or_error(value)
        except Exception:
            pass
    return as_text(value)


def as_text(value: Any) -> str:
    """A text itself, else the `repr`; cut after `LONGEST` characters."""
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception:
        return f"<{type(value).__name__} without a repr>"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"


def as_numbers_or_text(column: Sequence[Any]) -> list[float | str | None]:
    """Numbers if all values are, NaN among them, else text, which verl leaves out of its metrics.

    None, which is a value that does not apply, stays.
    """
    try:
        return [None if value is None else _number(value) for value in column]
    except Exception:
        return [None if value is None else as_text(value) for value in column]


def _number(value: Any) -> float:
    if isinstance(value, str | bytes):
        raise ValueError("text, even if it reads like a number")
    return float(value)
