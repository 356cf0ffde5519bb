"""Coding problems: from local files in rllm's or verl's form, or synthetic.

A row is {"problem": ..., "tests": ...}, with "solutions" or without. `test_cases.py` has the forms
of the tests, which may also be a text of JSON, as on the hub. Or it is in our schema, or in verl's:
of a file like that of Eurus-2-RL, those rows are taken which verl scores as code. Each solution is
run. A problem that takes any of several answers is left out: its tests know one of them.

Synthetic problems have one line:

    Read n, print n + 12.               print(int(input()) + 12)
    Write f(n): n * 7.                  def f(n):
                                            return n * 7

Half of the solutions take a line more than they need, and nothing in the problem says which: a
policy that learned from them has something to gain from the length reward. The test split uses
pairs of operator and number that the train split never shows.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import add, mul, sub
from random import Random
from typing import Any

from verl_gdpo.tasks import Rewards
from verl_gdpo.tasks.coding.problem import Problem, parse
from verl_gdpo.tasks.coding.score import TASK
from verl_gdpo.tasks.coding.test_cases import problem_of
from verl_gdpo.tasks.preparation import LeftOut
from verl_gdpo.tasks.preparation.schema import Row, require
from verl_gdpo.tasks.preparation.sources import Sources, make_row, seeded

Note = Callable[[str], None]
KEYS = ("problem", "tests")
VERLS_SOURCES = ("codecontests", "apps", "codeforces", "taco")  # `default_compute_score` has them
OPERATORS = {"+": add, "-": sub, "*": mul}
LONG_SHARE = 0.5
TESTS = 4
TEST_EVERY = 5  # of the pairs
# a problem that takes any of several answers, in the words of Codeforces and LeetCode
SEVERAL = re.compile(
    r"\b(?:print|output|return)(?:s|ed)?\s+any\b"
    r"|\b(?:print|output|return)\w*\b[^.\n]{0,80}\b(?:in any order|any suitable)\b"
    r"|\b(?:multiple|several|many|more than one)\b(?! times)[^.\n]{0,80}\bany\b(?! number)",
    re.IGNORECASE,
)
PRINTS = ("print(int(input()) {what})", "n = int(input())\nr = n {what}\nprint(r)")
RETURNS = ("def f(n):\n    return n {what}", "def f(n):\n    r = n {what}\n    return r")


def _row_of(item: Any, note: Note, **options: Any) -> Row:
    require(isinstance(item, dict), "", item, "an object")
    for key in (*KEYS, *item):
        if key not in item:
            raise ValueError(f"field {key}: missing")
        if key not in (*KEYS, "solutions"):
            raise ValueError(f"field {key}: unknown; expected {KEYS}, or 'solutions' too")
    value = item.get("solutions")
    solutions = value if isinstance(value, list) else [] if value is None else [value]
    require(isinstance(item["problem"], str), "problem", item["problem"], "a str")
    for text in solutions:
        require(isinstance(text, str), "solutions", text, "a str")
    _leave_out_several(item["problem"])
    tests = item["tests"]
    if isinstance(tests, str):
        tests = _read_json(tests, "tests")
    problem = _problem(tests, "tests", note)
    first, *others = [replace(problem, solution=one) for one in solutions] or [problem]
    if others:  # the first that passes; `_mend` tries a single one
        first = next((one for one in (first, *others) if _score(one, options)["pass"] == 1), first)
    return make_row(TASK, item["problem"], first.text(), TASK.system_prompt)


def _row_of_verl(row: Any, note: Note) -> Row:
    """One of ours as it is; of verl's, the prompt as it is and the ground truth in our form."""
    source = row.get("data_source")
    if source in (None, *TASK.data_sources):
        return dict(row)
    if source not in VERLS_SOURCES:
        raise LeftOut("another task")
    _leave_out_several(str(row.get("prompt")).replace("\\n", "."))
    field = "reward_model.ground_truth"
    reward_model = row.get("reward_model")
    is_object = isinstance(reward_model, Mapping) and "ground_truth" in reward_model
    require(is_object, "reward_model", reward_model, "an object with ground_truth")
    tests = _read_json(reward_model["ground_truth"], field)
    made = make_row(TASK, "", _problem(tests, field, note).text())
    return {**made, "prompt": row.get("prompt")}


def _read_json(text: Any, field: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"field {field}: got no JSON ({error!r})") from error


def _leave_out_several(problem: str) -> None:
    """Leave out a problem that takes answers that its tests do not know."""
    if SEVERAL.search(problem):
        raise LeftOut("it takes any of several answers, and its tests know one")


def _problem(tests: Any, field: str, note: Note) -> Problem:
    problem = problem_of(tests, field, lambda why: note(f"left out, of the tests ({why})"))
    if problem is None:
        raise LeftOut("no test that can be used")
    return problem


def _mend(ground_truth: str, **options: Any) -> tuple[str, str]:
    """The ground truth, without a solution that does not run here."""
    problem = parse(ground_truth)
    scores = _score(problem, options) if problem.solution is not None else {"pass": 1}
    if scores["pass"] == 1:
        return ground_truth, ""
    if scores["bug"] == 1:
        raise LeftOut("its solution gives other results than its tests")
    return replace(problem, solution=None).text(), "its solution, which does not run here, is gone"


def _score(problem: Problem, options: Mapping[str, Any]) -> Rewards:
    text = problem.text()
    # a busy machine must not decide which rows are kept
    return TASK.score(TASK.good_response(text), text, wall_seconds=60.0, **options)


def _made_row(rng: Random, split: str) -> Row:
    place, operator = rng.choice([*enumerate(OPERATORS)])
    is_test = split == "test"
    number = rng.choice([n for n in range(2, 100) if ((n + place) % TEST_EVERY == 0) == is_test])
    is_long, what = rng.random() < LONG_SHARE, f"{operator} {number}"
    numbers = rng.sample(range(-99, 100), TESTS)
    pairs = [(n, OPERATORS[operator](n, number)) for n in numbers]
    tests: list[dict[str, Any]]
    if rng.random() < 0.5:
        tests = [{"input": f"{n}\n", "output": f"{result}\n"} for n, result in pairs]
        asked, problem = "Read n, print", Problem(None, tests, PRINTS[is_long].format(what=what))
    else:
        tests = [{"args": [n], "kwargs": {}, "accepted": [result]} for n, result in pairs]
        asked, problem = "Write f(n):", Problem("f", tests, RETURNS[is_long].format(what=what))
    return make_row(TASK, f"{asked} n {what}.", problem.text(), TASK.system_prompt)


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(task=TASK, row_of=_row_of, of_verl=_row_of_verl, mend=_mend, make_rows=make_rows)
