"""The program of the processes that compare mathematical answers: see `limited_process.py`.

math-verify ends its own work by SIGALRM, which only a main thread can have, and which does not
interrupt Python inside one long multiplication.
"""

import contextlib
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any


def prepare() -> None:
    """Import what takes a second."""
    import math_verify  # noqa: F401

    logging.disable(logging.CRITICAL)  # it logs a traceback for each text that it cannot read


def answer(say: Callable[[bool], None], ground_truth: str, text: str) -> bool:
    """Say that the ground truth is read, if it is; return whether both are equal."""
    from math_verify import verify

    equal = False
    try:
        golds = _read_gold(ground_truth)
    except MemoryError:  # of a process that has read other answers; the next one has room
        raise
    except Exception:  # whatever a text has, sympy has an exception for it
        golds = []
    if golds:
        say(True)
        with contextlib.suppress(Exception):
            equal = bool(verify(golds, _read(text), timeout_seconds=None))
    return equal


def _read(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # None: its own limit is by SIGALRM, which stays ours
    return list(parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None))


_read_gold = lru_cache(64)(_read)  # the samples of a prompt share it
