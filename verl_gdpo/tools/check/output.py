"""What `verl-gdpo check` finds, and how it is printed: each line is a problem, a warning or a note.

Notes are printed at once, so that one sees how far the check is. Warnings and problems are easily
overlooked between them, so these stand together at the end.
"""

import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, TextIO, TypeVar

from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.terminal import coloured, line_of_code, wrapped

T = TypeVar("T")
Texts = str | Sequence[str] | None

# Exceptions with clear messages; any other exception is shown with its type and its line.
SPEAKING = (
    ValueError,
    AssertionError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    RewardError,
)
INDENT = " " * 7
# What is said of a module that is missing here.
MAY_BE_THERE = "What needs it was not checked: it may be where the run is"
COLOURS = {"problem": "red", "warning": "yellow", "note": "grey"}


class Output:
    """Prints notes and tables to `out`, and keeps warnings and problems until the end.

    With `is_brief`, notes and tables are printed at the end, and only if there is a problem.

    modules_elsewhere: the modules that the configuration names, if the run is on another machine.
        That one of them is missing here is a warning.
    """

    def __init__(self, out: TextIO, is_brief: bool = False) -> None:
        self.out = out
        self.is_brief = is_brief
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.modules_elsewhere: frozenset[str] = frozenset()
        self._kept: list[str] = []

    def note(self, texts: Texts) -> None:
        for text in _listed(texts):
            self.show(_line("note", text, self.out))

    def show(self, text: str) -> None:
        """Print a line of a note, or a table."""
        if self.is_brief:
            self._kept.append(text)
        else:
            print(text, file=self.out, flush=True)

    def ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of `question`; None after a problem."""
        try:
            return question(*arguments)
        # Code of the user's may end with sys.exit(), and nobody would know why the check ended.
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self.keep(error)
            return None

    def keep(self, error: BaseException) -> None:
        """Keep an exception as a problem, or as several."""
        if missing_module(error) in self.modules_elsewhere:
            self.warnings.append(f"{message_of(error)}. {MAY_BE_THERE}")
            return
        # A SettingsError has a message for each mistake. Its module would load torch here.
        self.problems += getattr(error, "mistakes", None) or [message_of(error)]

    def warn(self, question: Callable[..., Texts], *arguments: Any) -> None:
        """Keep the warnings that `question` returns."""
        self.warnings += _listed(self.ask(question, *arguments))

    def refuse(self, question: Callable[..., Texts], *arguments: Any) -> None:
        """Keep the problems that `question` returns."""
        self.problems += _listed(self.ask(question, *arguments))

    def finish(self) -> None:
        """Print what was kept of the notes, the warnings, and whether there is a problem."""
        if self.problems:
            for text in self._kept:
                print(text, file=self.out)
        for text in dict.fromkeys(self.warnings):
            print(_line("warning", text, self.out), file=self.out)
        if not self.problems:
            print(f"verl-gdpo check: no problem found{self._counted_warnings()}", file=self.out)
        self.out.flush()

    def finish_with_problems(self, err: TextIO, remark: str = "") -> None:
        """Print the problems to `err`, with their number in the last line.

        They are not wrapped, because a line that a user shall paste may stand in one.
        """
        # verl and we may say the same.
        problems = list(dict.fromkeys(self.problems))
        if not problems:
            return
        for text in problems:
            lines = f"\n{INDENT}".join(text.strip().splitlines())
            print(f"verl-gdpo check: {_label('problem', err)} {lines}", file=err)
        count = f"{len(problems)} problems"
        if len(problems) == 1:
            count = "1 problem"
        print(f"verl-gdpo check: {count}{self._counted_warnings()}{remark}", file=err)

    def _counted_warnings(self) -> str:
        count = len(set(self.warnings))
        if count == 0:
            return ""
        if count == 1:
            return ", 1 warning"
        return f", {count} warnings"


def missing_module(error: BaseException | None) -> str | None:
    """Return the package whose absence an exception is about; None for another reason."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            package = error.name.partition(".")[0]
            if find_spec(package):
                # A module that its package lacks is misspelt.
                return None
            return package
        error = error.__cause__ or error.__context__
    return None


def _listed(texts: Texts) -> list[str]:
    """Return the texts of a question, which may be one or none; an empty text is none."""
    if texts is None or texts == "":
        return []
    if isinstance(texts, str):
        return [texts]
    return list(texts)


def _label(kind: str, stream: TextIO) -> str:
    return coloured(f"{kind}:", COLOURS[kind], stream)


def _line(kind: str, text: str, stream: TextIO) -> str:
    """Return a note or a warning in lines of a terminal's width."""
    # Signs of a colour take no column, so the lines are made without them.
    plain = f"verl-gdpo check: {kind}: "
    lines = wrapped(text, plain, INDENT)
    return f"verl-gdpo check: {_label(kind, stream)} " + lines.removeprefix(plain)


def message_of(error: BaseException) -> str:
    """Return the text that a user needs instead of an exception's traceback."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = str(error).rpartition("full_key: ")[2]
        return f"{key}: {message_of(error.__cause__)}"
    if isinstance(error, SPEAKING) and str(error):
        return str(error)
    # If a file could not be loaded, the exception's cause has the reason.
    reason = error.__cause__ or error
    frames = traceback.extract_tb(reason.__traceback__)
    place = f"{type(reason).__name__}: {str(reason) or frames[-1].line} [{line_of_code(frames)}]"
    if isinstance(reason, SystemExit | KeyboardInterrupt):
        place += ". This would end the process in a training too"
    if reason is error:
        return place
    return f"{error}: {place}"
