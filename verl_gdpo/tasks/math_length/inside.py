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

# math-verify logs a traceback for each text that it cannot read.
logging.disable(logging.CRITICAL)
TINY = 1e-4  # Below it, six decimals leave too little of a number.
SCIENTIFIC = re.compile(r"(?<![\w.])(\d{1,20}(?:\.\d{1,20})?)[eE]([+-]?\d{1,4})(?![\w.])")


def answer(say: Callable[[bool], None], ground_truth: str, text: str) -> bool:
    """Say that the ground truth is read, if it is; return whether both are equal."""
    try:
        golds = _read_gold(ground_truth)
    except MemoryError:
        # This process has read other answers. The next one has room.
        raise
    except Exception:
        # Whatever a text has, sympy has an exception for it.
        golds = []
    if not golds:
        return False
    say(True)
    try:
        answers = _read(text)
        if not verify(golds, answers, timeout_seconds=None):
            return False
        return _are_near(golds, answers)
    except Exception:
        return False


def _are_near(golds: list[Any], answers: list[Any]) -> bool:
    """Whether an answer agrees to a hundredth with a tiny gold: math-verify has six decimals."""
    gold_numbers = _numbers(golds)
    if not any(0 < abs(gold) < TINY for gold in gold_numbers):
        return True
    answer_numbers = _numbers(answers)
    for gold in gold_numbers:
        if any(abs(number - gold) <= abs(gold) / 100 for number in answer_numbers):
            return True
    return False


def _numbers(values: list[Any]) -> list[float]:
    """Those of the values that are numbers; an expression may have a symbol."""
    numbers = []
    for value in values:
        with contextlib.suppress(Exception):
            numbers.append(float(value))
    return numbers


def _read(text: str) -> list[Any]:
    """What a text may stand for: 1.5e-7 is a number, where math-verify alone reads 1.5 e - 7."""
    readings = _parse(text)
    power = SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    if power != text:
        readings += _parse(power)
    return readings


def _parse(text: str) -> list[Any]:
    # Its own limit of time is by SIGALRM, which stays ours.
    return list(parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None))


# The samples of a prompt share its ground truth.
_read_gold = lru_cache(64)(_read)
