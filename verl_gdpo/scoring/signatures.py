"""What a function says of its arguments."""

import inspect
from collections.abc import Callable
from typing import Any

BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def keywords_of(function: Callable[..., Any]) -> tuple[set[str], bool]:
    """Return the names of the keywords that a function takes, and whether it takes any other."""
    parameters = inspect.signature(function).parameters.values()
    names = {each.name for each in parameters if each.kind in BY_KEYWORD}
    return names, any(each.kind is each.VAR_KEYWORD for each in parameters)
