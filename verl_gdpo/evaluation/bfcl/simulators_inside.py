"""The program of the processes that make calls on the simulators of the package `bfcl-eval`.

`sandbox/limited_process.py` runs it. The package would `eval` what a policy writes. Here a call is
parsed and never evaluated: it is the name of a public method, with literals as arguments.
"""

import ast
import copy
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any
from unittest import mock

ROOM_CHARS = 1 << 22  # of all results of a dialogue: more than any policy can read

# what the package forbids, so that its `eval` does not end its own process
_FORBIDDEN = ("kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run")
_original_defaults: dict[Any, Any] = {}


class Simulators:
    """Those of one question, as they are before its first turn."""

    def __init__(self, question: Mapping[str, Any]) -> None:
        self.instances = {name: _instance(name, question) for name in question["involved_classes"]}
        self._room = ROOM_CHARS
        self._methods: dict[str, MethodType] = {
            name: method
            for instance in self.instances.values()
            for name, method in inspect.getmembers(instance, inspect.ismethod)
            if not name.startswith("_")
        }

    def results(self, calls: Sequence[str]) -> list[str]:
        """Make calls, and return the text that the package returns for each."""
        return [self._result(call) for call in calls]

    def _result(self, call: str) -> str:
        try:
            text = _text(self._make(call))
        except Exception as error:  # whatever the simulator raises is what the policy reads
            text = f"Error during execution: {_said(error)}"
        self._room -= len(text)
        if self._room < 0:
            raise MemoryError
        return text.encode(errors="backslashreplace").decode()  # it may hold half a character

    def _make(self, call: str) -> Any:
        from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import _process_method_calls

        # without names, all that it does is to remove the blank before a parenthesis
        call = _process_method_calls(call, {}).lstrip(" \t")
        name = call.partition("(")[0]
        name = name.split(".")[1] if "." in name else name
        if name in _FORBIDDEN:
            raise ValueError(f"Function call {name} is not allowed.")
        # the package's evaluation says the same of what cannot be parsed
        parsed = _parsed(call)
        method = self._method(_name(parsed.func))
        positional = [_literal(value) for value in parsed.args]
        named = {keyword.arg or "": _literal(keyword.value) for keyword in parsed.keywords}
        return method(*positional, **named)

    def _method(self, name: str) -> Callable[..., Any]:
        """The method of a name, with default arguments that no other call has changed."""
        if name not in self._methods:
            raise NameError(f"name {name!r} is not defined")
        method = self._methods[name]
        function: Any = method.__func__
        defaults = _original_defaults.setdefault(function, copy.deepcopy(function.__defaults__))
        function.__defaults__ = copy.deepcopy(defaults)
        return method


def _said(error: Exception) -> str:
    try:
        return str(error)
    except Exception:  # a KeyError of a number with more digits than Python prints
        return type(error).__name__


def _parsed(call: str) -> ast.Call:
    parsed = ast.parse(call, "<string>", "eval").body
    if not isinstance(parsed, ast.Call):
        raise ValueError("expected the name of a function, and its arguments")
    return parsed


def _name(function: ast.expr) -> str:
    root: Any = function
    while isinstance(root, ast.Attribute):
        root = root.value
    if not isinstance(root, ast.Name):
        raise ValueError("expected the name of a function")
    if root is not function:  # no object has a name here, so none has attributes
        raise NameError(f"name {root.id!r} is not defined")
    return root.id


def _instance(name: str, question: Mapping[str, Any]) -> Any:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils as utils

    instance = getattr(importlib.import_module(utils.CLASS_FILE_PATH_MAPPING[name]), name)()
    if name not in utils.STATELESS_CLASSES:
        configuration = question["initial_config"].get(name, {})
        instance._load_scenario(configuration, long_context="long_context" in question["id"])
    return copy.deepcopy(instance)  # or it would share parts with its module and the question


def _literal(value: ast.expr) -> Any:
    for node in ast.walk(value):
        if isinstance(node, ast.Name):  # JSON's NaN, for one
            raise NameError(f"name {node.id!r} is not defined")
    try:
        return ast.literal_eval(value)
    except ValueError:  # its message has an address
        raise ValueError("expected a literal as an argument") from None


def _text(result: Any) -> str:
    """A result as the package gives it to its models."""
    if type(result) is str:
        return result
    if type(result) is dict:
        try:
            return json.dumps(result)
        except Exception:  # numbers of mpmath, for one
            return str(result)
    return str(result)


def results(question: Mapping[str, Any], steps: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the result of each call of each step."""
    simulators = Simulators(question)
    return [simulators.results(calls) for calls in steps]


def is_right(
    question: Mapping[str, Any],
    turns: Sequence[Sequence[Sequence[str]]],
    gold: Sequence[Sequence[str]],
) -> bool:
    """Return what the package's checker says of the calls of each step of each turn."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

    # both before any call
    fresh = {name: Simulators(question) for name in ("policy", "policy_ground_truth")}

    def execute(*, func_call_list: list[str], model_name: str, **_: Any) -> tuple[list[str], Any]:
        return fresh[model_name].results(func_call_list), fresh[model_name].instances

    with mock.patch.object(checker, "execute_multi_turn_func_call", execute):
        said = checker.multi_turn_checker(turns, gold, question, "", "policy")
    return bool(said["valid"])


def prepare() -> None:
    """Import the package's simulators, of which one needs mpmath."""
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    for module in multi_turn_utils.CLASS_FILE_PATH_MAPPING.values():
        importlib.import_module(module)


def answer(_say: Any, task: str, *given: Any) -> Any:
    """Return what `results` or `is_right` returns."""
    tasks: dict[str, Callable[..., Any]] = {"results": results, "is_right": is_right}
    return tasks[task](*given)
