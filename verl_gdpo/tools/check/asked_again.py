"""Asks verl what it refuses, and asks it again without what it has refused.

verl's own checks stop at the first mistake: `validate_config`, the constructors of its dataclasses
and of its trainers. So a value that a message is about is set to verl's default, in a copy, and the
check runs again.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, TypeVar

from omegaconf import OmegaConf

from verl_gdpo.tools.check.output import message_of, missing_module

T = TypeVar("T")

MOST = 8  # mistakes that one question may find
# A text of fewer letters, such as `on`, stands in messages that are about something else.
SHORTEST = 3
ABSENT = object()


def refusals(
    question: Callable[[Any], T], config: Any, defaults: Any
) -> tuple[T | None, list[Exception]]:
    """Return the result of a question, None after a mistake, and the mistakes.

    Args:
        question: takes a configuration, and raises at its first mistake.
        defaults: verl's own configuration.
    """
    try:
        return question(config), []
    except Exception as error:
        mistakes = [error]
    if missing_module(mistakes[0]) is not None:
        # With verl's module in its place, what fits the missing one would be refused.
        return None, mistakes
    mended = deepcopy(config)
    while len(mistakes) < MOST:
        following = _next_mistake(question, mended, defaults, message_of(mistakes[-1]))
        if following is None:
            break
        mistakes.append(following)
    return None, mistakes


def _next_mistake(
    question: Callable[[Any], Any], config: Any, defaults: Any, message: str
) -> Exception | None:
    """Mend what a message is about, and return the next mistake; None if there is none.

    What does not change the message is left as it is, so that nothing right is changed.
    """
    for key, value in _accused(config, defaults, message):
        before = OmegaConf.select(config, key)
        OmegaConf.update(config, key, value, force_add=True)
        try:
            question(config)
            return None
        except Exception as error:
            following = error
        new_message = message_of(following)
        # With another number, the same message is about the same mistake.
        is_same = _without_numbers(new_message) == _without_numbers(message)
        if not is_same and not _is_about(new_message, key, value):
            return following
        OmegaConf.update(config, key, before, force_add=True)
    return None


def _is_about(message: str, key: str, value: Any) -> bool:
    """Return whether a message is about a value that was only set to mend another mistake."""
    words = set(re.findall(r"\w+", message))
    if key.rpartition(".")[2] not in words:
        return False
    return value is None or str(value) in words


def _without_numbers(message: str) -> str:
    return re.sub(r"\d+", "", message)


def _accused(config: Any, defaults: Any, message: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, another value) of the keys whose name or value stands in a message."""
    words = set(re.findall(r"\w+", message))
    for key in _leaves(config):
        value = OmegaConf.select(config, key, throw_on_missing=False)
        default = OmegaConf.select(defaults, key, throw_on_missing=False, default=ABSENT)
        if default is ABSENT:
            continue  # It is of another engine than verl's default one.
        is_named = key.rpartition(".")[2] in words
        is_quoted = isinstance(value, str) and len(value) >= SHORTEST and value in message
        if not is_named and not is_quoted:
            continue
        if value != default:
            yield key, default
        elif value is None:
            # Some keys have to be set, and verl's default is that they are not: a micro-batch.
            yield key, 1


def _leaves(block: Any, path: str = "") -> Iterator[str]:
    """Yield each key with a value of its own, which is no interpolation."""
    for name in block:
        key = f"{path}{name}"
        if OmegaConf.is_missing(block, name) or OmegaConf.is_interpolation(block, name):
            continue
        if OmegaConf.is_dict(block[name]):
            yield from _leaves(block[name], f"{key}.")
        else:
            yield key
