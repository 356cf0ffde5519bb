"""Prints remarks at once, and collects problems for the end."""

import textwrap
import traceback
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from hydra.errors import HydraException, InstantiationException
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
    """Prints remarks to `out` and keeps problems."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.problems: list[str] = []

    def say(self, text: str) -> None:
        lines = textwrap.wrap(text, WIDTH - 7, break_long_words=False, break_on_hyphens=False)
        self.show("check: " + "\n       ".join(lines))

    def show(self, text: str) -> None:
        print(text, file=self.out, flush=True)

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
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = str(error).rpartition("full_key: ")[2]
        return f"{key}: {message_of(error.__cause__)}"
    if isinstance(error, SPEAKING) and str(error):
        return str(error)
    # if a file could not be loaded, the exception's cause has the reason
    reason = error.__cause__ or error
    frame = traceback.extract_tb(reason.__traceback__)[-1]
    place = (
        f"{type(reason).__name__}: {str(reason) or frame.line} [{frame.filename}:{frame.lineno}]"
    )
    return place if reason is error else f"{error}: {place}"
