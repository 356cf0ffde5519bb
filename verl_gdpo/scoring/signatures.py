"""What a function says of its arguments."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def keywords_of(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of the keywords that a function takes, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters if each.kind in BY_KEYWORD}
    return names, any(each.kind is each.VAR_KEYWORD for each in parameters)


def taken_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any], if_named: Collection[str]
) -> dict[str, Any]:
    """Return those of the arguments that a function takes.

    Args:
        if_named: arguments that a function with `**kwargs` does not get unless it names them.
    """
    names, takes_all = keywords_of(function)
    if takes_all:
        names |= arguments.keys() - set(if_named)
    return {name: arguments[name] for name in names if name in arguments}
