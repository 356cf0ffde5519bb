"""Coding: which share of the tests passes, is the answer short, does the program run?

The rewards of the coding task of GDPO (arXiv 2601.05242). The program runs in a
sandbox; what it gives back is compared here, so that it never meets an expected result.
"""

import json
import math
import sys
from collections.abc import Mapping
from decimal import Decimal
from itertools import chain
from typing import Any

from verl_gdpo.tasks import Evaluation, Programs, Task, sandbox
from verl_gdpo.tasks.coding import DATA_SOURCES
from verl_gdpo.tasks.coding import problem as form
from verl_gdpo.tasks.sandbox.machine import cores

# How far a result may be from an expected number that is no integer. The relative error is verl's;
# verl's absolute one is 1e-8, where problems allow an absolute or relative error of 1e-6.
ABSOLUTE = Decimal("1e-6")
RELATIVE = Decimal("1e-5")
LEAST_MEMORY_MB = 128


def score(
    response: str,
    ground_truth: str,
    *,
    response_tokens: int | None = None,
    step: int | None = None,
    limit_tokens: int = 4000,
    length_needs_pass: bool = True,
    max_tests: int = 10,
    seconds: float = 4.0,
    wall_seconds: float = 10.0,
    memory_mb: int = 512,
    weak_sandbox: bool = False,
    notes: sandbox.ExecutionNotes | None = None,
) -> dict[str, float]:
    """Score one response; every value is between 0 and 1.

    "pass": tests passed / tests. The first test that a limit ends is the last one that runs, and
    those after it are not passed. "length": 1 for at most `limit_tokens` tokens, if all tests pass;
    else 0. "bug": 1 for a program that runs without compilation or runtime errors, in the words of
    the paper; else 0: it ends every test without an exception and within its limits. A program that
    prints nothing in any test, where something is expected, counts as one that does not run: it may
    be empty, or end itself at once. Without a program all three are 0.

    A function's result is right if it is equal to one that is accepted, as JSON: a tuple is a list.
    Printed text is right if it has the same lines, and each line the same words; blank lines and
    the white space around words do not count. A number may be written in another way, as 2.0 for 2.
    Where the expected number is no integer, the result may differ from it by 1e-6 + 1e-5 of it.

    Args:
        response: decoded text without special tokens. No string raises.
        ground_truth: in the form that `problem.py` describes.
        response_tokens: length of the response; None counts as 0.
        step: part of every scorer's signature; unused.
        limit_tokens: in tokens; 4,000 in the paper.
        length_needs_pass: whether the length counts only if all tests pass.
        max_tests: only so many tests run, the first ones, as in verl's own scorer.
        seconds: CPU time of one test, on this machine.
        wall_seconds: of all tests together.
        memory_mb: of the program, on this machine.
        weak_sandbox: whether root may run programs in a sandbox in which they can read the expected
            results, on a machine that has no better one.
        notes: filled in, if there is a program.

    Raises:
        ValueError: malformed ground truth, or a bad option value.
        sandbox.SandboxError: this machine cannot run programs apart from itself.
    """
    _check_limit("limit_tokens", limit_tokens)
    _check_limit("max_tests", max_tests)
    _check_limit("seconds", seconds)
    _check_limit("wall_seconds", wall_seconds)
    _check_limit("memory_mb", memory_mb, LEAST_MEMORY_MB)
    problem = form.parse(ground_truth)

    passed = 0.0
    has_no_bug = False
    program = form.program_of(response)
    if program is not None:
        tests = problem.tests[:max_tests]
        results = sandbox.run(
            program,
            [_inputs_of(test) for test in tests],
            function=problem.function,
            seconds=seconds,
            wall_seconds=wall_seconds,
            memory_mb=memory_mb,
            allow_weak=weak_sandbox,
            notes=notes,
        )
        right = []
        for result, test in zip(results, tests, strict=True):
            right.append(result.finished and _is_right(result.output, test))
        passed = sum(right) / len(right)
        says_something = any(right) or any(result.output.strip() for result in results)
        has_no_bug = says_something and all(result.finished for result in results)

    is_short = (response_tokens or 0) <= limit_tokens
    length_counts = passed == 1.0 or not length_needs_pass
    return {
        "pass": passed,
        "length": float(is_short and length_counts),
        "bug": float(has_no_bug),
    }


def _check_limit(name: str, value: float, least: int = 1) -> None:
    """Raise ValueError for a limit that is too small, or that is none."""
    if not least <= value < math.inf:
        raise ValueError(f"coding {name}: got {value}; expected at least {least}, and finite")


def bounds(**options: Any) -> dict[str, tuple[float, float]]:
    """The lowest and highest value of each reward, for these options of `score`."""
    # A score of any problem refuses bad options.
    any_problem = form.Problem(None, [{"input": "", "output": ""}])
    score("", any_problem.text(), **options)
    return {"pass": (0.0, 1.0), "length": (0.0, 1.0), "bug": (0.0, 1.0)}


def _inputs_of(test: Mapping[str, Any]) -> dict[str, Any]:
    """What the program is told of a test: never what is expected of it."""
    return {key: test[key] for key in ("input", "args", "kwargs") if key in test}


def _is_right(output: str, test: Mapping[str, Any]) -> bool:
    """Whether what a program printed, or the result of a function, is what a test expects."""
    if "output" in test:
        return _is_same_text(output, test["output"])
    try:
        result = json.loads(output)
    except (ValueError, RecursionError):
        return False
    return any(_is_same(result, value) for value in test["accepted"])


def _is_same_text(text: str, expected: str) -> bool:
    lines = _words_of_lines(text)
    expected_lines = _words_of_lines(expected)
    # What follows compares the words of all lines in one row, and does not see where a line ends.
    if [len(words) for words in lines] != [len(words) for words in expected_lines]:
        return False
    words = chain.from_iterable(lines)
    expected_words = chain.from_iterable(expected_lines)
    return all(map(_is_same_word, words, expected_words))


def _words_of_lines(text: str) -> list[list[str]]:
    """The words of each line that has any."""
    lines = [line.split() for line in text.splitlines()]
    return [words for words in lines if words]


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if "_" in word:
        # Decimal takes 1_0 for 10.
        return False
    digits = expected.lstrip("+-")
    is_integer = digits.isdigit()
    if is_integer and len(digits) > 1 and digits.startswith("0"):
        # It is no number but a row of digits, such as one of a grid.
        return False
    return _is_same_number(word, expected, exactly=is_integer)


def _is_same(result: Any, expected: Any) -> bool:
    """Whether the values are equal; only as deep as the expected one."""
    if isinstance(expected, list):
        if not isinstance(result, list) or len(result) != len(expected):
            return False
        return all(map(_is_same, result, expected))
    if isinstance(expected, dict):
        if not isinstance(result, dict) or result.keys() != expected.keys():
            return False
        return all(_is_same(result[key], value) for key, value in expected.items())
    if isinstance(expected, float) and isinstance(result, int | float):
        return result == expected or _is_same_number(result, expected)
    return bool(result == expected)


def _is_same_number(got: str | float, expected: str | float, exactly: bool = False) -> bool:
    """Whether numbers are equal or, unless `exactly`, near enough."""
    try:
        number = Decimal(got)
        wanted = Decimal(expected)
        if not number.is_finite() or not wanted.is_finite():
            return False
        if exactly:
            return number == wanted
        return abs(number - wanted) <= ABSOLUTE + RELATIVE * abs(wanted)
    except ArithmeticError:
        # One of them is no number, or is as large as 1e1000000.
        return False


TASK = Task(
    name="coding",
    data_sources=DATA_SOURCES,
    score=score,
    bounds=bounds,
    reward_names=("pass", "length", "bug"),
    rows="verl_gdpo.tasks.coding.rows",
    scores="answer",  # A program within a thought is a draft.
    main_reward="pass",
    good_response=form.good_response,
    system_prompt=form.SYSTEM_PROMPT,
    missing=lambda weak_sandbox=False, **_: sandbox.missing(weak_sandbox),
    programs=Programs(cores),
    notes=sandbox.ExecutionNotes,
    evaluation=Evaluation(
        columns={
            "tests passed": lambda rewards: rewards["pass"],
            "solved": lambda rewards: float(rewards["pass"] == 1),
            "above the limit": lambda rewards: 1 - rewards["length"],
            "bugs": lambda rewards: 1 - rewards["bug"],
        },
        options={
            "length_needs_pass": False,  # The share of long answers is over all answers.
            "max_tests": sys.maxsize,
            # It is of all tests. The first one at its own limit is the last.
            "wall_seconds": 120.0,
        },
        max_tokens=8000,  # As in the paper's training.
    ),
)
