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

# The address of the public repository. While it is empty there is none, and no index of packages
# has ours.
ADDRESS = ""
WIDTH = 100  # columns
COLOURS = {"red": "1;31", "yellow": "33", "grey": "2"}  # of ANSI terminals
# Of other numbers, three decimals show less than two digits, or more than anybody reads.
LEAST_WITH_DECIMALS = 0.01
MOST_WITH_DECIMALS = 1e6
GO_ON = "A start with trainer.resume_mode=auto continues from the last checkpoint"
OF_PYTHON = ("<frozen", os.path.dirname(os.__file__))
# Once W&B is imported, a function of this file stands in the place of `sys.exit`.
SYS_EXIT = os.path.join("wandb", "sdk", "lib", "exit_hooks.py")
# {package that not every installation has: the extra that brings it}
EXTRAS = {
    "openai": "judge",
    "jinja2": "plots",
    "scipy": "plots",
    "pandas": "plots",
    "torch": "verl",
    "hydra": "verl",
    "pyarrow": "verl",
    "transformers": "verl",
    "huggingface_hub": "verl",
}

# What stands before each note on stderr. The last one is that of the command which runs.
_prefixes: list[str] = []


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
    prefix = _prefixes[-1] if _prefixes else ""
    print(prefix + printable(text), file=sys.stderr, flush=True)


def render(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Return an aligned, printable table. Columns with numbers in `left` are left-aligned."""
    table = [_printable_cells(header)]
    for row in rows:
        table.append(_printable_cells(row))

    widths = []
    for column in range(len(header)):
        widths.append(max(width_of(cells[column]) for cells in table))
    table.insert(1, ["-" * width for width in widths])

    lines = []
    for cells in table:
        padded = []
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True)):
            padding = " " * (width - width_of(cell))
            padded.append(cell + padding if column in left else padding + cell)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _printable_cells(cells: Sequence[str]) -> list[str]:
    return [printable(cell) for cell in cells]


def printable(text: str) -> str:
    """Return text that is safe for a terminal: characters that are not printable are escaped."""
    characters = []
    for character in text:
        if character.isprintable():
            characters.append(character)
        else:
            # ascii() puts quotation marks around the escape.
            characters.append(ascii(character)[1:-1])
    return "".join(characters)


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


def short_number(value: float) -> str:
    """Return a number with three decimals, or with three digits where decimals say little.

    A reward may be as small as a penalty for each token, of which three decimals would show 0.

    >>> short_number(-0.25), short_number(0.0000271), short_number(0.0)
    ('-0.250', '2.71e-05', '0.000')
    """
    size = abs(value)
    if size == 0:
        # -0.0 becomes 0.0.
        return f"{size:.3f}"
    if size < LEAST_WITH_DECIMALS or size >= MOST_WITH_DECIMALS:
        return f"{value:.3g}"
    return f"{value:.3f}"


def shorten(text: str, width: int) -> str:
    """Return the beginning of `printable(text)` that fits into `width` columns."""
    line = ""
    used = 0  # columns
    # Escapes only make a text longer, so characters beyond `width` are never shown.
    for character in printable(text[: width + 1]):
        used += width_of(character)
        if used > width:
            kept = max(len(line) - 3, 0)
            return line[:kept] + "..."[:width]
        line += character
    return line


def width_of(text: str) -> int:
    """Return how many columns a text takes in a terminal. East Asian wide characters take two."""
    wide = sum(unicodedata.east_asian_width(character) in ("W", "F") for character in text)
    return len(text) + wide


def needs_extra(error: ImportError) -> str:
    """Return what to do about a package of an extra that is not installed.

    Raises:
        ImportError: the same one, if it is not about such a package.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
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
