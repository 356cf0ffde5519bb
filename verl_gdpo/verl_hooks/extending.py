"""Puts our functions in the place of verl's.

What is put there is a plain function, which Ray can pickle even if a user's `__main__` holds it.
"""

import functools
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


def extends(owner: Any, name: str) -> Callable[[Function], Function]:
    """Call a function of ours in the place of one of verl's, with verl's as its first argument.

    Args:
        owner: the module or class that has verl's function.
    """

    def extend(function: Function) -> Function:
        original = getattr(owner, name)

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, instead)
        return function

    return extend
