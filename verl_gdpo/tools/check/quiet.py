"""Keeps what verl, Ray, torch and reward functions print out of the report.

They print through Python and past it, so the two file descriptors are turned away.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO


@dataclass
class Quiet:
    """`out` is where the report goes; at the end, `has_kept` says whether others printed."""

    out: TextIO
    has_kept: bool = False


@contextmanager
def others_kept_away(verbose: bool) -> Iterator[Quiet]:
    """Yield where to print. With `verbose`, others print as they like.

    If an exception leaves the block, what was kept goes to stderr.
    """
    if verbose:
        yield Quiet(sys.stdout)
        return
    before = _duplicates()
    in_memory = os.memfd_create("output")  # the folder for temporary files may be full, or missing
    with os.fdopen(in_memory, "w+b") as kept, os.fdopen(os.dup(before[0]), "w") as out:
        quiet, is_broken = Quiet(out), True
        _turn([kept.fileno()] * 2)
        try:
            yield quiet
            is_broken = False
        except BrokenPipeError:  # the reader of the report has gone
            is_broken = False
            raise
        finally:
            _turn(before)
            for number in before:
                os.close(number)
            kept.seek(0)
            text = kept.read().decode(errors="replace")
            quiet.has_kept = bool(text)
            if is_broken:
                sys.stderr.write(text)


def _duplicates() -> list[int]:
    return [os.dup(number) for number in (1, 2)]


def _turn(targets: list[int]) -> None:
    """Send everything that is printed from now on to these file descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    for target, number in zip(targets, (1, 2), strict=True):
        os.dup2(target, number)
