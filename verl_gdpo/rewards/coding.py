"""Coding: which share of the tests passes, is the answer short, does the program run?

The rewards of the coding task of GDPO (arXiv 2601.05242). The program runs in
`sandbox.py`, or in a service; what it gives back is compared here, so that it never meets an
expected result.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl_gdpo.rewards import sandbox
from verl_gdpo.rewards.coding_problem import (
    SYSTEM_PROMPT,
    good_response,
    labels,
    parse,
    program_of,
)
from verl_gdpo.rewards.sandbox_service import Service
from verl_gdpo.rewards.task import Task

TOLERANCE = 1e-6  # absolute and relative, of a number that is expected with a decimal point


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    step: int | None = None,
    length_limit: int = 4000,
    length_needs_pass: bool = True,
    max_tests: int = 10,
    seconds: float = 4.0,
    memory_mb: int = 512,
    weak_sandbox: bool = False,
    service: Service | None = None,
) -> dict[str, float]:
    """Score one response; every value is between 0 and 1.

    "pass": tests passed / tests. "length": 1 for at most `length_limit` tokens, if all tests pass;
    else 0. "bug": 1 for a program that compiles and ends every test without an exception and within
    the limits of time, memory and output; else 0. Without a program all three are 0.

    A function's result is right if it is equal to one that is accepted, as JSON: a tuple is a list.
    Printed text is right if it has the same words, whatever the white space. Where the expected
    number has a decimal point, it may differ by 1e-6, absolute or relative.

    Args:
        response: decoded text without special tokens. No string raises.
        ground_truth: in the form of `coding_problem.py`.
        response_tokens: length of the response; None counts as 0.
        step: part of every scorer's signature; unused.
        length_limit: in tokens; 4,000 in the paper.
        length_needs_pass: whether the length counts only if all tests pass.
        max_tests: only so many tests run, the first ones, as in verl's own scorer.
        seconds: CPU time of one test; see `sandbox.run` for what else it limits.
        memory_mb: of the program, on this machine.
        weak_sandbox: whether root may run programs in a sandbox in which they can read the expected
            results, on a machine that has no better one.
        service: runs programs in the place of this machine.

    Raises:
        TypeError: text that is not a str.
        ValueError: malformed ground truth, or a bad option value.
        sandbox.SandboxError: this machine cannot run programs apart from itself, or the service
            fails.
    """
    if not isinstance(response, str):
        raise TypeError(f"coding response: got {type(response).__name__}; expected str")
    _check_options(length_limit, max_tests, seconds, memory_mb)
    problem = parse(ground_truth)
    is_short = (response_tokens or 0) <= length_limit
    program = program_of(response)
    passed, finished = 0.0, False
    if program is not None:
        tests = problem.tests[:max_tests]
        run = (
            service.run
            if service
            else partial(sandbox.run, memory_mb=memory_mb, allow_weak=weak_sandbox)
        )
        given = [_given(test) for test in tests]
        outcomes = run(program, given, function=problem.function, seconds=seconds)
        right = [
            outcome.finished and _is_right(outcome.output, test)
            for outcome, test in zip(outcomes, tests, strict=True)
        ]
        passed = sum(right) / len(right)
        finished = all(outcome.finished for outcome in outcomes)
    counts = passed == 1.0 or not length_needs_pass
    return {"pass": passed, "length": float(is_short and counts), "bug": float(finished)}


def bounds(
    *,
    length_limit: int = 4000,
    length_needs_pass: bool = True,
    max_tests: int = 10,
    seconds: float = 4.0,
    memory_mb: int = 512,
    weak_sandbox: bool = False,
) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward, for these options of `score`."""
    _check_options(length_limit, max_tests, seconds, memory_mb)
    return {"pass": (0.0, 1.0), "length": (0.0, 1.0), "bug": (0.0, 1.0)}


def _check_options(length_limit: int, max_tests: int, seconds: float, memory_mb: int) -> None:
    for name, value, least in (
        ("length_limit", length_limit, 1),
        ("max_tests", max_tests, 1),
        ("seconds", seconds, 1),
        ("memory_mb", memory_mb, 128),
    ):
        if not least <= value < math.inf:
            raise ValueError(f"coding {name}: got {value}; expected at least {least}, and finite")


def _given(test: Mapping[str, Any]) -> dict[str, Any]:
    """What the program is told of a test: never what is expected of it."""
    return {key: test[key] for key in ("input", "args", "kwargs") if key in test}


def _is_right(output: str, test: Mapping[str, Any]) -> bool:
    if "output" in test:
        words, expected = output.split(), test["output"].split()
        return len(words) == len(expected) and all(map(_is_same_word, words, expected))
    try:
        result = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return any(_is_same(result, value) for value in test["accepted"])


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    try:
        return "." in expected and _is_close(float(word), float(expected))
    except ValueError:
        return False


def _is_same(result: Any, expected: Any) -> bool:
    """Whether the values are equal; only as deep as the expected one."""
    if isinstance(expected, list):
        is_list = isinstance(result, list) and len(result) == len(expected)
        return is_list and all(map(_is_same, result, expected))
    if isinstance(expected, dict):
        is_dict = isinstance(result, dict) and {*result} == {*expected}
        return is_dict and all(_is_same(result[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(result, int | float):
        return _is_close(result, expected)
    return bool(result == expected)


def _is_close(number: float, expected: float) -> bool:
    try:
        return math.isclose(number, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an int that no float can hold
        return False


def _missing(weak_sandbox: bool = False, **_: Any) -> Sequence[str]:
    return sandbox.missing(weak_sandbox)


TASK = Task(
    name="coding",
    data_sources=("verl_gdpo/coding",),
    score=score,
    bounds=bounds,
    reward_names=("pass", "length", "bug"),
    good_response=good_response,
    system_prompt=SYSTEM_PROMPT,
    labels=labels,
    missing=_missing,
    takes_service=True,
)
