"""Checks whether a training configuration can work. It starts no Ray, and loads no model.

verl-gdpo check [OPTIONS] [what stands behind `python -m verl.trainer.main_ppo`]

The arguments are those of the training command: `key=value`, and Hydra's --config-dir and
--config-name. The command lists all problems that it can find at once. The exit code is 1 if there
are problems, 2 for wrong arguments, and 3 if the check itself fails.
"""

import argparse
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from verl_gdpo.tasks.preparation.loading import whole_number
from verl_gdpo.tools import CHECK_FAULT
from verl_gdpo.tools.check.output import Output, message_of
from verl_gdpo.tools.compose import add_config_arguments, compose_accepted, packages_searched


@contextmanager
def others_kept_away(verbose: bool) -> Iterator[TextIO]:
    """Yield where to print. With `verbose`, others print as they like.

    If an exception leaves the block, what was kept goes to stderr. So does the line of Python at
    which the interpreter crashes, as a library of the user's may make it do.
    """
    if verbose:
        yield sys.stdout
        return
    before = [os.dup(number) for number in (1, 2)]
    in_memory = os.memfd_create("output")  # the folder for temporary files may be full, or missing
    with os.fdopen(in_memory, "w+b") as kept, os.fdopen(os.dup(before[0]), "w") as out:
        text = b""
        tells_crash = not faulthandler.is_enabled()
        if tells_crash:
            faulthandler.enable(before[1])
        _turn([kept.fileno()] * 2)
        try:
            yield out
        except Exception as error:
            if not isinstance(error, BrokenPipeError):  # the reader of the report has gone
                kept.seek(0)
                text = kept.read()
            raise
        finally:
            if tells_crash:
                faulthandler.disable()
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


@contextmanager
def ends_are_told() -> Iterator[None]:
    """Let what code of the user's does to end the process be an exception with its line.

    `os._exit` becomes `sys.exit` in this process, and not in those that it forks, which need it.
    A KeyboardInterrupt is then the user's code, because Ctrl-C raises `Stopped`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    os._exit = sys.exit  # type: ignore[assignment]  # which takes texts too
    if is_main:
        before = signal.signal(signal.SIGINT, _stop)
    try:
        yield
    finally:
        _give_exit_back()
        if is_main:
            signal.signal(signal.SIGINT, before)


class Stopped(BaseException):
    """Ctrl-C."""


def _stop(*_: Any) -> None:
    raise Stopped


def _give_exit_back() -> None:
    os._exit = EXIT


EXIT = os._exit
os.register_at_fork(after_in_child=_give_exit_back)


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(argv)  # as Hydra takes them
    try:
        with ends_are_told():
            return _printed(options)
    except Stopped:
        return 128 + signal.SIGINT
    except (BrokenPipeError, ModuleNotFoundError):  # the command says what these mean
        raise
    except Exception:
        traceback.print_exc()
        print("verl-gdpo check: the fault above is the check's own", file=sys.stderr)
        return CHECK_FAULT


def _printed(options: argparse.Namespace) -> int:
    with others_kept_away(options.verbose) as out:
        output = Output(out, options.brief)
        _check(output, options)
        output.finish()
    remark = ""
    if not options.verbose:
        remark = " (-v shows what verl and others printed meanwhile)"
    output.finish_with_problems(sys.stderr, remark)
    return 1 if output.problems else 0


def _check(output: Output, options: argparse.Namespace) -> None:
    missing = packages_searched(options.overrides)
    if options.elsewhere and missing:
        output.warnings.append(
            f"hydra.searchpath: {', '.join(missing)} is not installed here, so the configuration "
            "cannot be composed, and nothing of it was checked. It may be where the run is"
        )
        return
    composed = output.ask(compose_accepted, options)
    if composed is None:
        return
    config, refused = composed
    try:
        # verl takes seconds to load, and what it prints has to be kept away
        from verl_gdpo.tools.check.look import look
    except Exception as error:
        output.problems.append(f"verl cannot be used: {message_of(error)}")
        output.problems += [f"{override}: {message}" for override, message in refused.items()]
        return
    look(output, config, refused, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo check",
        description=__doc__.splitlines()[0],
        epilog="It looks at the configuration, the rows and the prompts, the rewards of made-up "
        "responses, and this machine. It trains no step, so it cannot tell whether a run learns.",
    )
    add_config_arguments(parser)
    add = parser.add_argument
    add("--elsewhere", action="store_true", help="the run will be on another machine, with GPUs")
    about = "how many rows to try the rewards on (default: 8)"
    add("--rows", type=partial(whole_number, 1), default=8, metavar="N", help=about)
    about = "a .jsonl, .json or .parquet file of more responses: {response: TEXT, row: NUMBER}"
    add("--responses", type=Path, metavar="FILE", help=about)
    about = "how long to wait for the next answer of the reward function (default: 60)"
    add("--seconds", type=_seconds, default=60.0, help=about)
    about = "the rewards may be the same for all made-up responses"
    add("--allow-flat", action="store_true", help=about)
    about = "call judges, and functions with limited=True, too"
    add("--ask-judge", action="store_true", help=about)
    about = "print notes and tables only if there is a problem"
    add("--brief", action="store_true", help=about)
    about = "show what verl and others print meanwhile"
    add("-v", "--verbose", action="store_true", help=about)
    return parser


def _seconds(text: str) -> float:
    """Return the seconds that an option's text is, for argparse; a queue waits for no others."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected a number of seconds above 0, such as 60"
        )
    return seconds
