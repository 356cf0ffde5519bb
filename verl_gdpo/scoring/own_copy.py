"""Copies what a reward function may change in place: dicts, lists and numpy arrays."""

import copy
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

COPIED = (dict, list, np.ndarray)


def own_copy(value: T) -> T:
    """Return a copy of all dicts, lists and arrays of a value; it shares all other objects.

    Others may be images, tokenizers or clients of a service, which no function owns. What stands
    twice in the value, also within itself, does so in the copy.

    >>> row = {"prompt": [{"role": "user"}], "text": "..."}
    >>> other = own_copy(row)
    >>> other["prompt"][0]["role"] = "system"
    >>> row
    {'prompt': [{'role': 'user'}], 'text': '...'}
    """
    if isinstance(value, COPIED):
        return _copied(value, {})  # type: ignore[no-any-return]
    return value


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """Copy a value of one of the classes `COPIED`.

    Most parts are texts and numbers: they are not handed to this function, which halves its time.

    copies: {id of an original: its copy}, of those that were copied already.
    """
    if id(value) in copies:
        return copies[id(value)]
    # The copy has the same class, which may be a defaultdict.
    result = copy.copy(value)
    # It is noted before its parts are copied, because the value may contain itself.
    copies[id(value)] = result
    if isinstance(result, dict):
        for key, part in result.items():
            if isinstance(part, COPIED):
                result[key] = _copied(part, copies)
    elif isinstance(result, list):
        for place, part in enumerate(result):
            if isinstance(part, COPIED):
                result[place] = _copied(part, copies)
    elif result.dtype == object:
        # An array of numbers was copied as a whole.
        for place in np.ndindex(result.shape):
            if isinstance(result[place], COPIED):
                result[place] = _copied(result[place], copies)
    return result
