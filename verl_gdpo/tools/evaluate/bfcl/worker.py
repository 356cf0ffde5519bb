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

LIMIT_CPU_S, LIMIT_WALL_S = 5, 60  # most requests take milliseconds
LIMIT_BYTES = 2 << 30
LONGEST_REPLY_BYTES = 1 << 24  # more than any policy can read
LANGUAGES = {"java": "Java", "javascript": "JavaScript"}  # {category: language}; others: Python
POLICY = "policy"  # a name for the package, which keeps simulators by name

_rows: dict[str, dict[str, Any]] = {}  # of the package; {key: row}


def questions(category: str) -> list[dict[str, Any]]:
    """Return all questions of a category; `tools` have hints about the programming language."""
    if not category.startswith("multi_turn"):
        _checker()
    path, times = POSSIBLE_ANSWER_PATH / TEST_FILE_MAPPING[category], Counter[str]()
    gold = {row["id"]: row["ground_truth"] for row in load_file(path)} if path.exists() else {}
    made = []
    for row in load_file(PROMPT_PATH / TEST_FILE_MAPPING[category]):
        times[row["id"]] += 1
        # two questions of live_relevance have one id
        key = row["id"] if times[row["id"]] == 1 else f"{row['id']}.{times[row['id']]}"
        known = {"key": key, "category": category, "gold": gold.get(row["id"], "")}
        _rows[key] = row | known
        tools, turns = _tools_and_turns(row)
        tools = func_doc_language_specific_pre_processing(tools, category)
        made.append({**known, "tools": tools, "turns": turns})
    return made


def _tools_and_turns(row: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What a policy can call from the start, and what the user says in each turn."""
    if "function" in row:
        return json.loads(json.dumps(row["function"])), row["question"]
    files = [MULTI_TURN_FUNC_DOC_PATH / DOCUMENTS[name] for name in row["involved_classes"]]
    tools = {tool["name"]: tool for file in files for tool in load_file(file)}
    turns = list(row["question"])
    for turn, names in row.get("missed_function", {}).items():
        content = REVEALED.format(functions=[tools.pop(name) for name in names])
        turns[int(turn)] = [{"role": "user", "content": content}]
    return [*tools.values()], turns


@functools.cache
def _checker() -> tuple[Callable[..., Any], str]:
    """The package's checker, and a name of a model for which it takes functions by their names."""
    # imports the clients of all providers: seconds, and memory that each process would copy
    from bfcl_eval.eval_checker.ast_eval import ast_checker

    models = ast_checker.MODEL_CONFIG_MAPPING.items()
    name = next(name for name, config in models if not config.underscore_to_dot)
    return ast_checker.ast_checker, name


def is_right(key: str, calls: list[dict[str, Any]]) -> bool:
    """Return whether calls answer a question of a single turn."""
    row, (check, model) = _rows[key], _checker()
    language = LANGUAGES.get(row["category"], "Python")
    asked = (row["function"], calls, row["gold"], language, row["category"], model)
    return bool(check(*asked)["valid"])


def results(key: str, steps: list[list[str]]) -> list[list[str]]:
    """Return what each call of each step of a dialogue returns, as a policy reads it."""
    row = _rows[key]
    simulated = (row["initial_config"], row["involved_classes"], POLICY, row["id"])
    is_long, run = "long_context" in row["id"], multi_turn_utils.execute_multi_turn_func_call
    made = [run(calls, *simulated, is_long)[0] for calls in steps]
    # a result may hold half a character
    return [[text.encode(errors="backslashreplace").decode() for text in step] for step in made]


def is_right_dialogue(key: str, turns: list[list[list[str]]]) -> bool:
    """Return whether the calls of each step of each turn of a dialogue are right."""
    row = _rows[key]
    return bool(multi_turn_checker(turns, row["gold"], row, row["category"], POLICY)["valid"])


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
    return list(json.loads(reply)) if reply.endswith(b"]") else []


def main(file_of_lock: str) -> None:
    """Reply until the input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no reply
    locking = runpy.run_path(file_of_lock)
    # Python's own files, because some modules are imported when they are first needed
    readable = (sys.prefix, sys.base_prefix)
    lock = functools.partial(locking["lock"], readable, None, locking["landlock_version"]())
    for module in multi_turn_utils.CLASS_FILE_PATH_MAPPING.values():
        importlib.import_module(module)  # once, and not in each process
    is_locked = apart(lambda: True, lock) == [True]
    print(json.dumps("" if is_locked else "no process can be locked in"), file=replies, flush=True)
    tasks = {task.__name__: task for task in (questions, is_right, results, is_right_dialogue)}
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
