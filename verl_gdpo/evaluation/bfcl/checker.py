"""Whether the calls of an answer are right, as the package's own checker says.

The package stops at some wrong answers, such as a number of 5,000 digits: here they are wrong. Its
converters of Java and JavaScript have regular expressions that a text of 200 characters keeps busy
for years. So where a question has lists or objects, each answer has a process with limits, and this
file is its program.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl_gdpo.evaluation.bfcl import data

if TYPE_CHECKING:  # its imports take longer than all else in a process
    from verl_gdpo.evaluation.bfcl.form import Call

LANGUAGES = {"java": "Java", "javascript": "JavaScript"}  # {category: language}; others: Python
# of Java's and JavaScript's types, those whose values the package reads by such expressions
COLLECTIONS = {"Array", "ArrayList", "HashMap", "array", "dict"}
LIMIT_CPU_S = 2  # right answers take a tenth of a second, nearly all of it to start
LIMIT_WALL_S = 300
LIMIT_BYTES = 2 << 30
# how an answer ends its process
ENDED_BY_ANSWER = (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGABRT)


def is_correct(row: data.Row, category: str, found: "Sequence[Call]") -> bool:
    """Return whether calls answer a question of a single turn.

    Args:
        row: one of `data.rows(category)`.
        found: the calls of the answer; values of Java and JavaScript are texts.

    Raises:
        ValueError: the package is missing, or is another version.
        RuntimeError: a process fails, and not over the answer.
    """
    if category in data.WITHOUT_GROUND_TRUTH:
        return bool(found) is (category == "live_relevance")
    output = [{call.name: call.parameters} for call in found]
    arguments = [row["function"], output, row["ground_truth"], category]
    may_hang = category in LANGUAGES and COLLECTIONS & _types(row["function"])
    return _in_process(arguments) if may_hang else _is_correct(*arguments)


def _types(functions: Sequence[Any]) -> set[str]:
    properties = [one["parameters"]["properties"].values() for one in functions]
    return {parameter["type"] for of_one in properties for parameter in of_one}


def _is_correct(functions: list[Any], output: list[Any], gold: list[Any], category: str) -> bool:
    check = data.ast_checker()
    try:
        language = LANGUAGES.get(category, "Python")
        return check(functions, output, gold, language, category, "")["valid"] is True
    except Exception:  # raised over the answer: the gold of every question passes
        return False


def _in_process(arguments: list[Any]) -> bool:
    data.package()  # its errors are for users
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(arguments),
            capture_output=True,
            text=True,
            timeout=LIMIT_WALL_S,
        )
    except (subprocess.TimeoutExpired, RecursionError):  # it is nested too deep for Python
        return False
    if done.returncode in ENDED_BY_ANSWER:
        return False
    if done.returncode:
        raise RuntimeError(
            f"bfcl_v3: the process that checks {arguments[-1]} ended with {done.returncode}; "
            f"expected 0. Its last words: {done.stderr[-500:]!r}"
        )
    # the package prints some errors too
    return done.stdout.split()[-1] == "True"


def _main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, LIMIT_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    print("\n", _is_correct(*json.load(sys.stdin)))


if __name__ == "__main__":
    _main()
