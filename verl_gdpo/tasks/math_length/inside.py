"""The program of the processes that compare mathematical answers: see `sandbox/limited_pool.py`.

math-verify ends its own work by SIGALRM, which only a main thread can have, and which does not
interrupt Python inside one long multiplication.
"""

import contextlib
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

logging.disable(logging.CRITICAL)  # it logs a traceback for each text that it cannot read
TINY = 1e-4  # below it, six decimals leave too little of a number
SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,4})(?![\w.])")


def answer(say: Callable[[bool], None], ground_truth: str, text: str) -> bool:
    """Say that the ground truth is read, if it is; return whether both are equal."""
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
            answers = _read(text)
            equal = bool(verify(golds, answers, timeout_seconds=None)) and _are_near(golds, answers)
    return equal


def _are_near(golds: list[Any], answers: list[Any]) -> bool:
    """Whether an answer agrees to a hundredth with a tiny gold: math-verify has six decimals."""
    numbers = _numbers(golds)
    if not any(0 < abs(gold) < TINY for gold in numbers):
        return True
    return any(abs(x - gold) <= abs(gold) / 100 for gold in numbers for x in _numbers(answers))


def _numbers(values: list[Any]) -> list[float]:
    numbers = []
    for value in values:
        with contextlib.suppress(Exception):  # an expression may have a symbol
            numbers.append(float(value))
    return numbers


def _read(text: str) -> list[Any]:
    """What a text may stand for: 1.5e-7 is a number, where math-verify alone reads 1.5 e - 7."""
    power = SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    return _parse(text) + (_parse(power) if power != text else [])


def _parse(text: str) -> list[Any]:
    # None: its own limit is by SIGALRM, which stays ours
    return list(parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None))


_read_gold = lru_cache(64)(_read)  # the samples of a prompt share it
