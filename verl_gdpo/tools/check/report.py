"""Collects what is found: remarks at once, problems for the end."""

import textwrap
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.batch.rows import RewardError

T = TypeVar("T")

WIDTH = 100

# their messages say enough; any other exception is shown with its type and its line
SPEAKING = (
    ValueError,
    AssertionError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    RewardError,
)


class Report:
    """Prints remarks as they are found, and keeps problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def say(self, text: str) -> None:
        lines = textwrap.wrap(text, WIDTH - 7, break_long_words=False, break_on_hyphens=False)
        print("check: " + "\n       ".join(lines), flush=True)

    def ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """The answer; None where there is a problem, or where an argument has been one."""
        if any(argument is None for argument in arguments):
            return None
        try:
            return question(*arguments)
        except Exception as error:
            self.problems.append(message_of(error))
            return None


def message_of(error: BaseException) -> str:
    """What a user needs to know of an exception, in place of its traceback."""
    if isinstance(error, SPEAKING):
        return str(error) or type(error).__name__
    # of a file that could not be loaded, the cause is the reason
    reason = error.__cause__ or error
    frame = traceback.extract_tb(reason.__traceback__)[-1]
    place = f"{type(reason).__name__}: {reason} [{frame.filename}:{frame.lineno}]"
    return place if reason is error else f"{error}: {place}"
