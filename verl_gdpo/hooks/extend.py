"""Puts our functions in the place of verl's.

What is put there is a plain function, which Ray can pickle even if a user's `__main__` holds it.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Function = Callable[..., Any]


def extends(owner: Any, name: str) -> Callable[[Function], Function]:
    """Call a function of ours in the place of one of verl's, with verl's as its first argument.

    Modules that have imported verl's function by its name get ours too: those of
    `VERL_USE_EXTERNAL_MODULES` are loaded before us.

    Args:
        owner: the module or class that has verl's function.
    """

    def extend(function: Function) -> Function:
        original = getattr(owner, name)

        @functools.wraps(original)
        def instead(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, instead)
        for module in [*sys.modules.values()] if isinstance(owner, ModuleType) else ():
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, instead)
        return function

    return extend
