"""Checks whether a training configuration can work. It starts no Ray, and loads no model.

verl-gdpo check [OPTIONS] [what stands behind `python -m verl.trainer.main_ppo`]

The arguments are those of the training command: `key=value`, and Hydra's --config-dir and
--config-name. The command lists all problems that it can find at once. The exit code is 1 if there
are problems.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, TypeVar

from hydra.errors import HydraException, InstantiationException
from omegaconf.errors import OmegaConfBaseException

from verl_gdpo.algorithm.values import RewardError
from verl_gdpo.terminal import line_of_code, wrapped
from verl_gdpo.tools.compose import add_config_arguments, compose_accepted

T = TypeVar("T")
Texts = str | Sequence[str] | None

# exceptions with clear messages; any other exception is shown with its type and its line
SPEAKING = (
    ValueError,
    AssertionError,
    OSError,
    HydraException,
    OmegaConfBaseException,
    RewardError,
)


class Output:
    """Prints remarks and tables to `out`, and keeps problems.

    With `is_brief`, only warnings are printed, and after a problem the rest too.
    """

    def __init__(self, out: TextIO, is_brief: bool = False) -> None:
        self.out, self.is_brief = out, is_brief
        self.problems: list[str] = []
        self._kept: list[str] = []

    def say(self, remarks: Texts, is_warning: bool = False) -> None:
        if isinstance(remarks, str):
            remarks = [remarks]
        for text in remarks or ():
            self.show(wrapped(text, "check: ", " " * 7), is_warning)

    def show(self, text: str, is_warning: bool = False) -> None:
        if self.is_brief and not is_warning:
            self._kept.append(text)
        else:
            print(text, file=self.out, flush=True)

    def ask(self, question: Callable[..., T], *arguments: Any) -> T | None:
        """Return the result of `question`; None after a problem."""
        try:
            return question(*arguments)
        except Exception as error:
            # A SettingsError has a message for each mistake. Its module would load torch here.
            self.problems += getattr(error, "mistakes", None) or [message_of(error)]
            return None

    def warn(self, question: Callable[..., Texts], *arguments: Any) -> None:
        self.say(self.ask(question, *arguments), is_warning=True)

    def refuse(self, question: Callable[..., Sequence[str]], *arguments: Any) -> None:
        """Keep the problems that `question` lists."""
        self.problems += self.ask(question, *arguments) or []

    def finish(self) -> None:
        last = self._kept if self.problems else ["check: no problem found"]
        for text in last:
            print(text, file=self.out, flush=True)


def message_of(error: BaseException) -> str:
    """Return the text that a user needs instead of an exception's traceback."""
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        key = str(error).rpartition("full_key: ")[2]
        return f"{key}: {message_of(error.__cause__)}"
    if isinstance(error, SPEAKING) and str(error):
        return str(error)
    # if a file could not be loaded, the exception's cause has the reason
    reason = error.__cause__ or error
    frames = traceback.extract_tb(reason.__traceback__)
    place = f"{type(reason).__name__}: {str(reason) or frames[-1].line} [{line_of_code(frames)}]"
    return place if reason is error else f"{error}: {place}"


@contextmanager
def others_kept_away(verbose: bool) -> Iterator[TextIO]:
    """Yield where to print. With `verbose`, others print as they like.

    If an exception leaves the block, what was kept goes to stderr.
    """
    if verbose:
        yield sys.stdout
        return
    before = [os.dup(number) for number in (1, 2)]
    in_memory = os.memfd_create("output")  # the folder for temporary files may be full, or missing
    with os.fdopen(in_memory, "w+b") as kept, os.fdopen(os.dup(before[0]), "w") as out:
        text = b""
        _turn([kept.fileno()] * 2)
        try:
            yield out
        except Exception as error:
            if not isinstance(error, BrokenPipeError):  # the reader of the report has gone
                kept.seek(0)
                text = kept.read()
            raise
        finally:
            _turn(before)
            for number in before:
                os.close(number)
            sys.stderr.write(text.decode(errors="replace"))


def _turn(targets: list[int]) -> None:
    """Send everything that is printed from now on to these file descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    for target, number in zip(targets, (1, 2), strict=True):
        os.dup2(target, number)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)  # as Hydra takes them
    with others_kept_away(options.verbose) as out:
        output = Output(out, options.brief)
        _check(output, options)
        output.finish()
    for problem in dict.fromkeys(output.problems):  # verl and we may say the same
        print(f"check: {problem}", file=sys.stderr)
    if output.problems and not options.verbose:
        print("(-v shows what verl and others printed meanwhile)", file=sys.stderr)
    return 1 if output.problems else 0


def _check(output: Output, options: argparse.Namespace) -> None:
    composed = output.ask(compose_accepted, options)
    if composed is None:
        return
    config, refused = composed
    output.problems += refused
    try:
        # verl takes seconds to load, and what it prints has to be kept away
        from verl_gdpo.tools.check.look import look
    except Exception as error:
        output.problems.append(f"verl cannot be used: {message_of(error)}")
        return
    look(output, config, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo check",
        description=__doc__.splitlines()[0],
        epilog="docs/check.md says what it looks for, and what it does not check.",
    )
    add_config_arguments(parser)
    add = parser.add_argument
    add("--elsewhere", action="store_true", help="the run will be on another machine, with GPUs")
    add("--rows", type=int, default=8, help="number of rows to try the rewards on")
    about = "a .jsonl or .parquet file of responses to try too: {response: TEXT, row: NUMBER}"
    add("--responses", type=Path, metavar="FILE", help=about)
    about = "how long to wait for the next answer of the reward function (default: 60)"
    add("--seconds", type=float, default=60.0, help=about)
    about = "the rewards may be the same for all made-up responses"
    add("--allow-flat", action="store_true", help=about)
    about = "call judges, and functions with limited=True, too"
    add("--ask-judge", action="store_true", help=about)
    about = "print warnings, and the rest only if there is a problem"
    add("--brief", action="store_true", help=about)
    about = "show what verl and others print meanwhile"
    add("-v", "--verbose", action="store_true", help=about)
    return parser
