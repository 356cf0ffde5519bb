"""Assert statements about a function, read without running them.

    assert candidate(nums = [2, 7], target = 9) == [0, 1]

becomes {"args": [], "kwargs": {"nums": [2, 7], "target": 9}, "accepted": [[0, 1]]}.
"""

import ast
import json
from typing import Any

from verl_gdpo.data_prep import LeftOut

Test = dict[str, Any]


def statements_of(source: str) -> list[ast.stmt]:
    """The statements of a text; raises ValueError if it is no Python."""
    try:
        return ast.parse(source).body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"no Python ({error})") from error


def checked(source: str) -> tuple[str, list[ast.stmt]]:
    """The function that `def check(candidate): ...` and a last `check(FUNCTION)` are about.

    Returns:
        its name, without `Solution().`, and the statements of `check`.

    Raises:
        ValueError: the text has another form.
    """
    match statements_of(source):
        case [
            ast.FunctionDef(name="check", body=body),
            ast.Expr(ast.Call(func=ast.Name("check"), args=[function])),
        ]:
            match function:
                case ast.Name(name) | ast.Attribute(ast.Call(ast.Name("Solution")), name):
                    return name, body
    raise ValueError("not `def check(candidate): ...` and `check(FUNCTION)`")


def call_of(statement: ast.stmt) -> tuple[str, Test]:
    """The name and the test of `assert NAME(...) == literal`.

    Raises:
        LeftOut: the statement is none, or a value has no JSON.
    """
    match statement:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(name), args=args, keywords=keywords),
                ops=[ast.Eq()],
                comparators=[expected],
            )
        ):
            named = {keyword.arg: keyword.value for keyword in keywords}
            if None in named:
                raise LeftOut("arguments after **")
            return name, {
                "args": [_literal(arg) for arg in args],
                "kwargs": {key: _literal(value) for key, value in named.items()},
                "accepted": [_literal(expected)],
            }
    raise LeftOut("a statement that is not `assert FUNCTION(...) == literal`")


def _literal(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        raise LeftOut("an argument or result that is no literal") from None
    try:
        as_json = json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        raise LeftOut("an argument or result that JSON cannot hold") from None
    if as_json != _with_lists(value):  # the keys of an object are texts
        raise LeftOut("an argument or result that JSON cannot hold")
    return as_json


def _with_lists(value: Any) -> Any:
    """The value with lists in place of tuples, as JSON has them."""
    if isinstance(value, tuple | list):
        return [_with_lists(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return value
