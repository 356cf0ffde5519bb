"""The forms in which data sets write down the tests of a coding problem, turned into our one form.

    {"functional": "def check(candidate):\\n    assert candidate(n = 3) == 10\\n..."}   LeetCode's
    [{"input": "3\\n", "output": "10\\n"}]                                            Codeforces'
    {"inputs": ["3\\n"], "outputs": ["10\\n"]}                                        verl's
    {"fn_name": "add", "inputs": ["3\\n7"], "outputs": ["10"]}                        verl's

A test whose content has no place in our form, such as a comparison by a function that no row
defines, is left out and counted. Another form is an error.
"""

import ast
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from verl_gdpo.tasks.coding.problem import Problem
from verl_gdpo.tasks.preparation import LeftOut

Test = dict[str, Any]
From = TypeVar("From")
Into = TypeVar("Into")
# How tests of PrimeIntellect's and LiveCodeBench's lists say that they call a function. Others of
# these lists say "stdin_stdout" and "stdin".
CALLS_IN_LISTS = {"type": "function_call", "testtype": "functional"}
FORMS = (
    "{functional}, a list of {input, output}, or verl's {inputs, outputs}, with fn_name or without"
)


def problem_of(tests: Any, field: str, leave_out: Callable[[str], None]) -> Problem | None:
    """The problem with these tests; None if each of them is left out.

    Args:
        tests: in one of the forms above.
        field: where they are in the row.
        leave_out: is told why a test is left out.

    Raises:
        ValueError: they have another form.
    """
    try:
        function, calls = _read(tests, leave_out)
    except ValueError as error:
        what = f"{error}: {repr(tests)[:80]}"
        raise ValueError(f"field {field}: got {what}; expected {FORMS}") from error
    if not calls:
        return None
    return Problem(function, calls)


def _read(tests: Any, leave_out: Callable[[str], None]) -> tuple[str | None, list[Test]]:
    """The function and its tests; raises ValueError for another form."""
    if isinstance(tests, list):
        return None, _kept(_printing, enumerate(tests), leave_out)
    if not isinstance(tests, dict):
        raise ValueError(f"the type {type(tests).__name__}")
    # All objects of a column of parquet have the same keys, so a key without a value says nothing.
    parts = {key: value for key, value in tests.items() if value is not None}
    if parts.keys() == {"functional"}:
        function, statements = _checked(_text(parts["functional"]))
        return function, _kept(_call_of, statements, leave_out)
    return _read_verls(parts, leave_out)


def _read_verls(
    parts: dict[str, Any], leave_out: Callable[[str], None]
) -> tuple[str | None, list[Test]]:
    """The same for verl's form."""
    if parts.keys() - {"fn_name"} != {"inputs", "outputs"}:
        raise ValueError(f"the keys {list(parts)}")
    inputs = _list(parts["inputs"])
    outputs = _list(parts["outputs"])
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    pairs = list(zip(inputs, outputs, strict=True))
    if "fn_name" in parts:
        function = _text(parts["fn_name"])
        return function, _unwrapped(_kept(_verls_call, pairs, leave_out))
    tests = [{"input": _lines(given), "output": _lines(expected)} for given, expected in pairs]
    return None, tests


def _kept(
    read: Callable[[From], Into], items: Iterable[From], leave_out: Callable[[str], None]
) -> list[Into]:
    """What `read` makes of the items, without those that it leaves out."""
    kept = []
    for item in items:
        try:
            kept.append(read(item))
        except LeftOut as reason:
            leave_out(str(reason))
    return kept


def _printing(numbered: tuple[int, Any]) -> Test:
    """A test of a program, out of a list and its number there."""
    number, test = numbered
    if not isinstance(test, dict) or "input" not in test or "output" not in test:
        raise ValueError(f"test {number} without input and output")
    is_call = any(test.get(key) == value for key, value in CALLS_IN_LISTS.items())
    if is_call or test.get("fn_name") is not None:
        raise LeftOut("a test of a list that calls a function")
    try:
        return {"input": _text(test["input"]), "output": _text(test["output"])}
    except ValueError as error:
        raise ValueError(f"in test {number} {error}") from None


def _verls_call(pair: tuple[Any, Any]) -> Test:
    """One call: each line of the input is an argument as JSON, and so is the output."""
    lines, output = pair
    try:
        args = lines
        if isinstance(lines, str):
            args = [json.loads(line) for line in lines.split("\n")]
        result = output
        if isinstance(output, str):
            result = json.loads(output)
    except (ValueError, RecursionError):
        raise LeftOut("an argument or result that is no JSON") from None
    return {"args": _list(args), "kwargs": {}, "accepted": [result]}


def _unwrapped(tests: list[Test]) -> list[Test]:
    """The tests of a problem whose data set may have put each result into a list.

    verl also takes the first element of a list for the whole, since APPS and TACO write [3] for
    the result 3. Only a problem all of whose results are lists of one element can be meant so; no
    test says whether it is, so both are accepted.
    """
    results = [test["accepted"][0] for test in tests]
    if not all(isinstance(result, list) and len(result) == 1 for result in results):
        return tests
    unwrapped = []
    for test, result in zip(tests, results, strict=True):
        unwrapped.append(test | {"accepted": [result, result[0]]})
    return unwrapped


def _lines(text: Any) -> str:
    if isinstance(text, list):
        return "\n".join(_text(line) for line in text)
    return _text(text)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the type {type(value).__name__} where a text should be")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"the type {type(value).__name__} where a list should be")
    return value


def _checked(source: str) -> tuple[str, list[ast.stmt]]:
    """The function that `def check(candidate): ...` and a last `check(FUNCTION)` are about.

    Returns:
        its name, without `Solution().`, and the statements of `check`.

    Raises:
        ValueError: the text has another form.
    """
    try:
        statements = ast.parse(source).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python ({error})") from error
    match statements:
        case [
            ast.FunctionDef(name="check", body=body),
            ast.Expr(ast.Call(func=ast.Name("check"), args=[function])),
        ]:
            match function:
                case ast.Name(name) | ast.Attribute(ast.Call(ast.Name("Solution")), name):
                    return name, body
    raise ValueError("not `def check(candidate): ...` and `check(FUNCTION)`")


def _call_of(statement: ast.stmt) -> Test:
    """The test of `assert candidate(...) == literal`, read without running it.

    assert candidate(nums = [2, 7], target = 9) == [0, 1]

    becomes {"args": [], "kwargs": {"nums": [2, 7], "target": 9}, "accepted": [[0, 1]]}.

    Raises:
        LeftOut: the statement is none, or a value has no JSON.
    """
    match statement:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name("candidate"), args=args, keywords=keywords),
                ops=[ast.Eq()],
                comparators=[expected],
            )
        ):
            named = {keyword.arg: keyword.value for keyword in keywords}
            if None in named:
                raise LeftOut("arguments after **")
            return {
                "args": [_literal(arg) for arg in args],
                "kwargs": {key: _literal(value) for key, value in named.items()},
                "accepted": [_literal(expected)],
            }
    raise LeftOut("a statement that is not `assert candidate(...) == literal`")


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise LeftOut("an argument or result that is no literal") from None
    try:
        _refuse_other_keys(node)
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        raise LeftOut("an argument or result that JSON cannot hold") from None


def _refuse_other_keys(node: ast.expr) -> None:
    """Raise ValueError for an object with a key that is no text, which JSON would turn into one."""
    for part in ast.walk(node):
        if not isinstance(part, ast.Dict):
            continue
        for key in part.keys:
            if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
                raise ValueError("the keys of an object are texts")
