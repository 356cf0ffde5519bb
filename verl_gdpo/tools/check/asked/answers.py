"""What verl answered: problems, warnings and notes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.tools.check.output import MAY_BE_THERE, message_of, missing_module
from verl_gdpo.tools.check.verl_questions import VERSION

T = TypeVar("T")

# With these, verl refuses a value. Any other exception may come from another version of verl, in
# which a function takes other arguments than ours: then nothing is refused.
REFUSALS = (
    ValueError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    ZeroDivisionError,
    ImportError,
    OSError,
    HydraException,
    OmegaConfBaseException,
)


@dataclass
class Answers:
    """What a run's configuration cannot mean, what is hardly meant, and what nobody here knows.

    Each is a list of sentences.

    is_elsewhere: the run will be on another machine. That a package is missing here is a warning.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    is_elsewhere: bool = False

    def ask(
        self, key: str, question: Callable[..., T], *arguments: Any, remedy: str = ""
    ) -> T | None:
        """Return the result of `question`, a function of verl or one that calls verl.

        If verl refuses, a problem names the key, and None is returned.

        Args:
            key: of the configuration, with its value or without.
            remedy: a sentence that says how to mend it.
        """
        try:
            return question(*arguments)
        except REFUSALS as error:
            if self.is_elsewhere and missing_module(error) is not None:
                self.warnings.append(_sentence(key, error, MAY_BE_THERE))
            else:
                self.problems.append(_sentence(key, error, remedy))
        except Exception as error:
            self.notes.append(
                f"{key}: not checked, because verl {VERSION} could not be asked: "
                f"{type(error).__name__}: {error}"
            )
        return None

    def lack(self, path: str, sentence: str) -> None:
        """Say that a file or a folder of the run is not here.

        Another machine may have it: then it is a warning. But if the folder around it is here, its
        own name is wrong.
        """
        if self.is_elsewhere and not is_around_here(path):
            self.warnings.append(f"{sentence}. {MAY_BE_THERE}")
        else:
            self.problems.append(sentence)

    def look(self, part: str, question: Callable[..., None], *arguments: Any) -> None:
        """Ask all questions about a part of a run; a note says if verl is another than ours.

        Args:
            part: what is looked at, in words.
        """
        try:
            question(*arguments, self)
        except Exception as error:
            self.notes.append(
                f"{part}: not checked, because verl {VERSION} could not be asked: "
                f"{type(error).__name__}: {error}"
            )


def is_around_here(path: str) -> bool:
    """Whether the folder in which a file or a folder would lie is on this machine.

    A path that begins with a dot is meant from where the command is given. Each machine has a root
    and a home.
    """
    if path.startswith("."):
        return True
    around = Path(path).expanduser().absolute().parent
    return around.is_dir() and around not in (Path("/"), Path.home())


def _sentence(key: str, error: Exception, remedy: str) -> str:
    """Return what a refusal of verl says, with the key in front of it."""
    reason = message_of(error).rstrip(".")
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        block = reason.partition(":")[0]  # Hydra names the block whose class could not be made.
        if block == key or block.startswith(f"{key}."):
            return message_of(error)
        reason = message_of(error.__cause__).rstrip(".")
    sentence = f"{key}: {reason}"
    if remedy:
        sentence += f". {remedy}"
    return sentence
