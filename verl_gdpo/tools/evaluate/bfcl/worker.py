"""The program that asks the package `bfcl-eval`, in an environment of the package's own.

worker.py FILE_OF_LOCK: it says why nothing can be locked in, or "". Then it gets requests and gives
replies, a line of JSON each: [task, *arguments], and [reply] or, if the request needs too much or
ends its process, [].

The package `eval`s the calls of dialogues, which a policy writes, and its converters of Java and
JavaScript have regular expressions that 200 characters keep busy for years. So each such request
has a process of its own, which `sandbox/lock.py` locks before: it writes no file, reads none but
Python's, opens no socket and starts no process, and nothing that it changes is there for the next
request. Python's calls of single turns are JSON, and the checker only compares their values.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from bfcl_eval.constants.category_mapping import MULTI_TURN_FUNC_DOC_FILE_MAPPING as DOCUMENTS
from bfcl_eval.constants.category_mapping import TEST_FILE_MAPPING
from bfcl_eval.constants.default_prompts import (
    DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING as REVEALED,
)
from bfcl_eval.constants.eval_config import (
    MULTI_TURN_FUNC_DOC_PATH,
    POSSIBLE_ANSWER_PATH,
    PROMPT_PATH,
)
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.model_handler.utils import func_doc_language_specific_pre_processing
from bfcl_eval.utils import load_file

# Most requests take milliseconds.
LIMIT_CPU_S = 5
LIMIT_WALL_S = 60
LIMIT_BYTES = 2 << 30
# It is more than any policy can read.
LONGEST_REPLY_BYTES = 1 << 24
# {category: language}; the others are Python.
LANGUAGES = {"java": "Java", "javascript": "JavaScript"}
# The package keeps simulators by the name of a model.
POLICY = "policy"

# {key: row of the package}
_rows: dict[str, dict[str, Any]] = {}


def questions(category: str) -> list[dict[str, Any]]:
    """Return all questions of a category; `tools` have hints about the programming language."""
    if not category.startswith("multi_turn"):
        _checker()
    path = POSSIBLE_ANSWER_PATH / TEST_FILE_MAPPING[category]
    gold = {}
    if path.exists():
        gold = {row["id"]: row["ground_truth"] for row in load_file(path)}

    times = Counter[str]()
    made = []
    for row in load_file(PROMPT_PATH / TEST_FILE_MAPPING[category]):
        name = row["id"]
        times[name] += 1
        key = name
        # Two questions of live_relevance have one id.
        if times[name] > 1:
            key = f"{name}.{times[name]}"
        known = {"key": key, "category": category, "gold": gold.get(name, "")}
        _rows[key] = row | known
        tools, turns = _tools_and_turns(row)
        hinted = func_doc_language_specific_pre_processing(tools, category)
        made.append(known | {"tools": hinted, "turns": turns})
    return made


def _tools_and_turns(row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return what a policy can call from the start, and what the user says in each turn."""
    if "function" in row:
        # The package writes its hints into the tools, and the checker needs them without.
        tools = json.loads(json.dumps(row["function"]))
        return tools, row["question"]
    tool_of = {}
    for name in row["involved_classes"]:
        for tool in load_file(MULTI_TURN_FUNC_DOC_PATH / DOCUMENTS[name]):
            tool_of[tool["name"]] = tool
    turns = list(row["question"])
    # Some tools are there only after a turn in which the user shows them.
    for turn, names in row.get("missed_function", {}).items():
        content = REVEALED.format(functions=[tool_of.pop(name) for name in names])
        turns[int(turn)] = [{"role": "user", "content": content}]
    return list(tool_of.values()), turns


@functools.cache
def _checker() -> tuple[Callable[..., Any], str]:
    """Return the package's checker, and a model for which it takes functions by their names."""
    # This imports the clients of all providers, which takes seconds, and memory that each process
    # would copy.
    from bfcl_eval.eval_checker.ast_eval import ast_checker

    models = ast_checker.MODEL_CONFIG_MAPPING.items()
    name = next(name for name, config in models if not config.underscore_to_dot)
    return ast_checker.ast_checker, name


def is_right(key: str, calls: list[dict[str, Any]]) -> bool:
    """Return whether calls answer a question of a single turn."""
    row = _rows[key]
    check, model = _checker()
    language = LANGUAGES.get(row["category"], "Python")
    said = check(row["function"], calls, row["gold"], language, row["category"], model)
    return bool(said["valid"])


def results(key: str, steps: list[list[str]]) -> list[list[str]]:
    """Return what each call of each step of a dialogue returns, as a policy reads it."""
    row = _rows[key]
    made = []
    for calls in steps:
        texts, _ = multi_turn_utils.execute_multi_turn_func_call(
            calls,
            row["initial_config"],
            row["involved_classes"],
            POLICY,
            row["id"],
            "long_context" in row["id"],
        )
        # A result may hold half a character.
        made.append([text.encode(errors="backslashreplace").decode() for text in texts])
    return made


def is_right_dialogue(key: str, turns: list[list[list[str]]]) -> bool:
    """Return whether the calls of each step of each turn of a dialogue are right."""
    row = _rows[key]
    said = multi_turn_checker(turns, row["gold"], row, row["category"], POLICY)
    return bool(said["valid"])


def here(answer: Callable[[], Any]) -> list[Any]:
    """Return [what a function returns], or [] if it raises: the ground truth never does."""
    try:
        return [answer()]
    except Exception:
        return []


def apart(answer: Callable[[], Any], lock: Callable[[], None]) -> list[Any]:
    """Return [what a locked process returns], or [] if it needs too much or ends itself.

    Raises:
        OSError: somebody else has killed it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException), os.fdopen(writing, "w") as file:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_S, resource.RLIM_INFINITY))
            resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
            lock()
            file.write(json.dumps([answer()]))
        os._exit(0)
    os.close(writing)
    start = time.monotonic()
    late = threading.Timer(LIMIT_WALL_S, os.kill, (child, signal.SIGKILL))
    late.start()
    with os.fdopen(reading, "rb") as file:
        reply = file.read(LONGEST_REPLY_BYTES)
    _, status = os.waitpid(child, 0)
    is_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    if is_killed and time.monotonic() - start < LIMIT_WALL_S:
        raise OSError("somebody has killed a process of bfcl-eval; is there enough memory?")
    late.cancel()
    late.join()
    if not reply.endswith(b"]"):
        return []
    return list(json.loads(reply))


def main(file_of_lock: str) -> None:
    """Reply until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    # What the package prints is no reply.
    os.dup2(2, 1)
    locking = runpy.run_path(file_of_lock)
    # A locked process reads Python's own files, because some modules are imported when they are
    # first needed.
    readable = (sys.prefix, sys.base_prefix)
    lock = functools.partial(locking["lock"], readable, None, locking["landlock_version"]())
    # These are imported once, and not in each process.
    for module in multi_turn_utils.CLASS_FILE_PATH_MAPPING.values():
        importlib.import_module(module)

    trouble = ""
    if apart(lambda: True, lock) != [True]:
        trouble = "no process can be locked in"
    print(json.dumps(trouble), file=replies, flush=True)

    tasks: dict[str, Callable[..., Any]] = {
        "questions": questions,
        "is_right": is_right,
        "results": results,
        "is_right_dialogue": is_right_dialogue,
    }
    for line in sys.stdin:
        task, *arguments = json.loads(line)
        answer = functools.partial(tasks[task], *arguments)
        if task == "questions":
            reply = [answer()]
        elif task == "is_right" and _rows[arguments[0]]["category"] not in LANGUAGES:
            reply = here(answer)
        else:
            reply = apart(answer, lock)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
