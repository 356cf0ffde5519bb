"""Formats tables and model output for a terminal, and handles a closed output."""

import os
import signal
import sys
import textwrap
import traceback
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

ADDRESS = ""  # of the public repository; empty: there is none, and no index has the package
WIDTH = 100  # columns
COLOURS = {"red": "1;31", "yellow": "33", "grey": "2"}  # of ANSI terminals
GO_ON = "A start with trainer.resume_mode=auto continues from the last checkpoint"
OF_PYTHON = ("<frozen", os.path.dirname(os.__file__))
# Once W&B is imported, a function of this file stands in the place of `sys.exit`.
SYS_EXIT = os.path.join("wandb", "sdk", "lib", "exit_hooks.py")
# the extra that brings a package which not every installation has
EXTRAS = {
    "openai": "judge",
    **dict.fromkeys(("jinja2", "scipy", "pandas"), "plots"),
    **dict.fromkeys(("torch", "hydra", "pyarrow", "transformers", "huggingface_hub"), "verl"),
}


_prefixes: list[str] = []  # of the command that runs, before what it says on stderr


@contextmanager
def speaking_as(command: str) -> Iterator[None]:
    """Begin what `note` prints in the block with the name of a command, such as verl-gdpo data."""
    _prefixes.append(f"{command}: ")
    try:
        yield
    finally:
        _prefixes.pop()


def note(text: str) -> None:
    """Say something on stderr, in the name of the command if one runs."""
    print("".join(_prefixes[-1:]) + printable(text), file=sys.stderr, flush=True)


def render(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return an aligned, printable table. Columns with numbers in `left` are left-aligned."""
    lines = [[*map(printable, line)] for line in (header, *rows)]
    widths = [max(width_of(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell + " " * (width - width_of(cell))
            if i in left
            else " " * (width - width_of(cell)) + cell
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Return text that is safe for a terminal: characters that are not printable are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def wrapped(text: str, first: str = "", others: str = "  ") -> str:
    """Return the text in lines of `WIDTH` columns, which begin with `first` and `others`."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )


def coloured(text: str, colour: str, stream: TextIO) -> str:
    """Return the text in a colour of `COLOURS`, if the stream is a terminal that shows colours.

    See https://no-color.org.
    """
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if is_plain or not stream.isatty():
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def line_of_code(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return "FILE:LINE" of the last frame outside Python's own library: the caller's mistake."""
    theirs = []
    for frame in frames:
        is_of_python = frame.filename.startswith(OF_PYTHON) or frame.filename.endswith(SYS_EXIT)
        if not is_of_python:
            theirs.append(frame)
    frame = (theirs or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def shorten(text: str, width: int) -> str:
    """Return the beginning of `printable(text)` that fits into `width` columns."""
    # escapes only make a text longer, so characters beyond `width` are never shown
    line, used = "", 0
    for c in printable(text[: width + 1]):
        used += width_of(c)
        if used > width:
            return line[: max(len(line) - 3, 0)] + "..."[:width]
        line += c
    return line


def width_of(text: str) -> int:
    """Return how many columns a text takes in a terminal. East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def needs_extra(error: ImportError) -> str:
    """Return what to do about a package of an extra that is not installed.

    Raises:
        ImportError: the same one, if it is not about such a package.
    """
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        raise error
    return f"{error.name} is not installed: {install_line(extra)}"


def install_line(extra: str) -> str:
    """Return the command that installs us with an extra, as `ADDRESS` allows.

    A folder is written with a slash. pip takes a bare name for that of a package of the index,
    which may be anybody's, even where a folder of that name lies beside.
    """
    if ADDRESS:
        return f"pip install 'verl-gdpo[{extra}]'"
    return f"pip install './verl-gdpo[{extra}]'"


def let_go_of_stdout() -> None:
    """Send all further output to /dev/null, because its reader has gone, as in `... | head`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def printing(main: Callable[[], int]) -> int:
    """Run a command and return its exit code, or 141 if the reader of its output has gone."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        let_go_of_stdout()
        return 128 + signal.SIGPIPE
