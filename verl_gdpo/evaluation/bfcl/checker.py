"""Whether the calls of an answer are right, as the package's own checker says.

The package stops at some wrong answers, such as a number of 5,000 digits: here they are wrong. Its
converters of Java and JavaScript have regular expressions that a text of 200 characters keeps busy
for years. So where a question has lists or objects, a process with limits checks the answer, and
this file is its program, which `sandbox/limited_process.py` runs.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_gdpo.evaluation.bfcl import data
from verl_gdpo.sandbox.limited_process import LimitedPool

if TYPE_CHECKING:
    from verl_gdpo.evaluation.bfcl.form import Call

LANGUAGES = {"java": "Java", "javascript": "JavaScript"}  # {category: language}; others: Python
# of Java's and JavaScript's types, those whose values the package reads by such expressions
COLLECTIONS = {"Array", "ArrayList", "HashMap", "array", "dict"}
LIMIT_CPU_S = 2.0  # right answers take milliseconds
LIMIT_BYTES = 2 << 30
_pool = LimitedPool(__file__, LIMIT_CPU_S, LIMIT_BYTES)


def is_correct(row: data.Row, category: str, found: "Sequence[Call]") -> bool:
    """Return whether calls answer a question of a single turn.

    Args:
        row: one of `data.rows(category)`.
        found: the calls of the answer; values of Java and JavaScript are texts.

    Raises:
        ValueError: the package is missing, or is another version.
        OSError: no process can be started, or two in a row die, and not over the answer.
    """
    if category in data.WITHOUT_GROUND_TRUTH:
        return bool(found) is (category == "live_relevance")
    output = [{call.name: call.parameters} for call in found]
    arguments = [row["function"], output, row["ground_truth"], category]
    if category not in LANGUAGES or not COLLECTIONS & _types(row["function"]):
        return answer(None, *arguments)
    try:
        request = json.dumps(arguments)
    except RecursionError:
        return False
    replies, is_whole = _pool.ask(request, f"the checker of bfcl-eval, {category}")
    return is_whole and bool(replies[-1])


def _types(functions: Sequence[Any]) -> set[str]:
    properties = [one["parameters"]["properties"].values() for one in functions]
    return {parameter["type"] for of_one in properties for parameter in of_one}


def prepare() -> None:
    """Import the package's checker."""
    data.ast_checker()


def answer(
    _say: Any, functions: list[Any], output: list[Any], gold: list[Any], category: str
) -> bool:
    """Return what the package's checker says."""
    check = data.ast_checker()
    try:
        language = LANGUAGES.get(category, "Python")
        return check(functions, output, gold, language, category, "")["valid"] is True
    except Exception:  # raised over the answer: the gold of every question passes
        return False
