"""Tables and model output for a terminal."""

import os
import signal
import sys
import unicodedata
from collections.abc import Callable, Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """A table with its columns aligned: those numbered in `left` to the left, others right."""
    lines = [list(header), *map(list, rows)]
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
    """Text that a terminal shows and does not obey: what is no visible character is escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def shorten(text: str, width: int) -> str:
    """The beginning of `printable(text)` that fits into `width` columns."""
    # escapes only lengthen a text, so what lies beyond `width` characters is never shown
    line, used = "", 0
    for c in printable(text[: width + 1]):
        used += width_of(c)
        if used > width:
            return line[: max(len(line) - 3, 0)] + "..."[:width]
        line += c
    return line


def width_of(text: str) -> int:
    """Columns of a terminal; East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def let_go_of_stdout() -> None:
    """What is printed from here on goes nowhere: its reader has gone, as behind `| head`."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def printing(main: Callable[[], int]) -> int:
    """The exit code of a command; 141, and no traceback, when the reader of its output has gone."""
    try:
        code = main()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        let_go_of_stdout()
        return 128 + signal.SIGPIPE
