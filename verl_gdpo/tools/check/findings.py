"""Prints remarks at once, and collects problems for the end."""

import textwrap
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.batch.rows import RewardError

T = TypeVar("T")

WIDTH = 100

# exceptions with clear messages; any other exception is shown with its type and its line
SPEAKING = (
    ValueError,
    AssertionError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    RewardError,
)


class Findings:
    """Prints remarks and keeps problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def say(self, text: str) -> None:
        lines = textwrap.wrap(text, WIDTH - 7, break_long_words=False, break_on_hyphens=False)
        print("check: " + "\n       ".join(lines), flush=True)

    def ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of `question`; None after a problem, or if an argument is None."""
        if any(argument is None for argument in arguments):
            return None
        try:
            return question(*arguments)
        except Exception as error:
            self.problems.append(message_of(error))
            return None


def message_of(error: BaseException) -> str:
    """Return the text that a user needs instead of an exception's traceback."""
    if isinstance(error, SPEAKING):
        return str(error) or type(error).__name__
    # if a file could not be loaded, the exception's cause has the reason
    reason = error.__cause__ or error
    frame = traceback.extract_tb(reason.__traceback__)[-1]
    place = f"{type(reason).__name__}: {reason} [{frame.filename}:{frame.lineno}]"
    return place if reason is error else f"{error}: {place}"
