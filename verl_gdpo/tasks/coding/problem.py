"""The written-down form of a coding problem's ground truth, and what an answer looks like.

A program that reads standard input and prints:

    {"function": null, "tests": [{"input": "3\\n", "output": "10\\n"}]}

A function, or a method of a class `Solution`. `accepted` are the results that count as right, of
which data preparation writes several only where verl's own form leaves open which is meant:

    {"function": "add", "tests": [{"args": [3], "kwargs": {}, "accepted": [10]}]}

Both may have a "solution": a program that passes. It is shown to nobody but `check`.
"""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FENCE = "```"
PYTHON = "python"
OPENING = re.compile(rf"{FENCE}[ \t]*(?:{PYTHON}|py)[\d.]*(?!\w)", re.IGNORECASE)
# A program whose first line is indented, as in an item of a list.
INDENTED = re.compile(r"\s*\n[ \t]+\S")
# How a program begins. A comment does not count, because it is a heading in Markdown.
FIRST_LINE = re.compile(r"(?:import|from|def|class|for|print)\b|@|[A-Za-z_][\w,.\[\] ]*=")
SYSTEM_PROMPT = (
    "Solve the problem in Python, with its standard library alone. The program reads standard "
    "input and prints the answer, unless the problem asks for a function or a class. End with the "
    f"whole program, once, between a line {FENCE}{PYTHON} and a line {FENCE}."
)
KEYS = {"function", "tests"}
# The parts of a test and their types, for a program that prints and for a function.
PRINTS: Mapping[str, type] = {"input": str, "output": str}
CALLS: Mapping[str, type] = {"args": list, "kwargs": dict, "accepted": list}


@dataclass(frozen=True)
class Problem:
    """A ground truth that has been checked; see the top of this file."""

    function: str | None
    tests: Sequence[Mapping[str, Any]]
    solution: str | None = None

    def text(self) -> str:
        """The ground truth."""
        parts: dict[str, Any] = {"function": self.function, "tests": self.tests}
        if self.solution is not None:
            parts["solution"] = self.solution
        return json.dumps(parts, ensure_ascii=False)


def parse(ground_truth: str) -> Problem:
    """Return the problem of a ground truth.

    Raises:
        ValueError: it has another form; names the part.
    """
    try:
        parts = json.loads(ground_truth)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"coding ground truth: got no JSON ({error}): {repr(ground_truth)[:80]}"
        ) from error
    if not isinstance(parts, dict):
        raise _bad_keys(parts)
    if parts.keys() - {"solution"} != KEYS:
        raise _bad_keys(list(parts))

    function = parts["function"]
    if function is not None and not (isinstance(function, str) and function.isidentifier()):
        raise _bad("function", function, "null or a name")
    solution = parts.get("solution")
    if solution is not None and not isinstance(solution, str):
        raise _bad("solution", solution, "a program")
    tests = parts["tests"]
    if not isinstance(tests, list) or not tests:
        raise _bad("tests", tests, "a list of at least one")
    types = PRINTS if function is None else CALLS
    for number, test in enumerate(tests):
        _check_test(test, f"tests[{number}]", types)
    return Problem(function, tests, solution)


def _check_test(test: Any, where: str, types: Mapping[str, type]) -> None:
    if not isinstance(test, dict) or test.keys() != types.keys():
        raise _bad(where, test, f"an object with the keys {sorted(types)}")
    for key, expected in types.items():
        if not isinstance(test[key], expected):
            raise _bad(f"{where}.{key}", test[key], f"a {expected.__name__}")
    try:
        test.get("input", "").encode()
    except UnicodeEncodeError:
        # JSON can hold half a surrogate pair, a file cannot.
        raise _bad(f"{where}.input", test["input"], "valid Unicode") from None
    if not test.get("accepted", True):
        raise _bad(f"{where}.accepted", test["accepted"], "at least one result")


def _bad_keys(got: Any) -> ValueError:
    return ValueError(f"coding ground truth: got {repr(got)[:80]}; expected the keys {KEYS}")


def _bad(where: str, got: Any, expected: str) -> ValueError:
    return ValueError(f"coding ground truth, {where}: got {repr(got)[:80]}; expected {expected}")


def program_of(response: str) -> str | None:
    """The program of a response, None without one: the last block that begins with ```python.

    ```py and ```python3 are the same. Without any such block, the last that begins with ```. One
    that does not end goes to the end of the response. Without any block, what follows the thoughts,
    if its first line looks like Python.
    """
    openings = list(OPENING.finditer(response))
    if openings:
        program, _, _ = response[openings[-1].end() :].partition(FENCE)
        return _without_indentation(program)

    # Every other part stands after a fence that opens a block.
    blocks = response.split(FENCE)[1::2]
    if blocks:
        return _without_indentation(blocks[-1])

    _, _, answer = response.rpartition("</think>")
    answer = answer.strip()
    if FIRST_LINE.match(answer):
        return answer
    return None


def _without_indentation(block: str) -> str:
    """Return a block without the indentation that all of its lines have."""
    # Python would refuse such a program, so that no other program is changed.
    if INDENTED.match(block):
        return textwrap.dedent(block)
    return block


def good_response(ground_truth: str) -> str:
    """A response with the ground truth's solution or, without one, with a table of the results."""
    problem = parse(ground_truth)
    program = problem.solution
    if program is None:
        table = _TABLE_PRINTED if problem.function is None else _TABLE_CALLED
        program = table.format(tests=repr(problem.tests), name=problem.function)
    return f"{FENCE}{PYTHON}\n{program.strip()}\n{FENCE}"


_TABLE_PRINTED = """\
import sys
given = sys.stdin.read()
print(next(test["output"] for test in {tests} if test["input"] == given))
"""
_TABLE_CALLED = """\
def {name}(*args, **kwargs):
    given = [*args], kwargs
    return next(t["accepted"][0] for t in {tests} if (t["args"], t["kwargs"]) == given)
"""
