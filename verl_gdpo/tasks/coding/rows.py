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
from collections.abc import Callable, Mapping, Sequence
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
# The data sources that `default_compute_score` of verl scores as code.
VERLS_SOURCES = ("codecontests", "apps", "codeforces", "taco")
OPERATORS = {"+": add, "-": sub, "*": mul}
LONG_SHARE = 0.5  # The share of synthetic solutions that take a line more than they need.
TESTS = 4  # The tests of a synthetic problem.
TEST_EVERY = 5  # One in so many pairs of operator and number belongs to the test split.
# A problem that takes any of several answers, in the words of Codeforces and LeetCode.
SEVERAL = re.compile(
    r"\b(?:print|output|return)(?:s|ed)?\s+any\b"
    r"|\b(?:print|output|return)\w*\b[^.\n]{0,80}\b(?:in any order|any suitable)\b"
    r"|\b(?:multiple|several|many|more than one)\b(?! times)[^.\n]{0,80}\bany\b(?! number)",
    re.IGNORECASE,
)
SHORT_PROGRAM = "print(int(input()) {what})"
LONG_PROGRAM = "n = int(input())\nr = n {what}\nprint(r)"
SHORT_FUNCTION = "def f(n):\n    return n {what}"
LONG_FUNCTION = "def f(n):\n    r = n {what}\n    return r"


def _row_of(item: Any, note: Note, **options: Any) -> Row:
    """The row of {"problem": ..., "tests": ...}, with "solutions" or without.

    Args:
        options: of the scorer.
    """
    require(isinstance(item, dict), "", item, "an object")
    for key in KEYS:
        if key not in item:
            raise ValueError(f"field {key}: missing")
    for key in item:
        if key not in KEYS and key != "solutions":
            raise ValueError(f"field {key}: unknown; expected {KEYS}, or 'solutions' too")
    question = item["problem"]
    require(isinstance(question, str), "problem", question, "a str")
    solutions = _solutions_of(item)
    _leave_out_several(question)

    tests = item["tests"]
    if isinstance(tests, str):
        tests = _read_json(tests, "tests")
    problem = _problem(tests, "tests", note)
    if solutions:
        solution = _first_that_passes(solutions, problem, options)
        problem = replace(problem, solution=solution)
    return make_row(TASK, question, problem.text(), TASK.system_prompt)


def _solutions_of(item: Mapping[str, Any]) -> list[str]:
    """The solutions of an object, which may be a list, a single text or null."""
    value = item.get("solutions")
    if value is None:
        return []
    solutions = value if isinstance(value, list) else [value]
    for solution in solutions:
        require(isinstance(solution, str), "solutions", solution, "a str")
    return solutions


def _first_that_passes(
    solutions: Sequence[str], problem: Problem, options: Mapping[str, Any]
) -> str:
    """The first solution that passes; if none does, the first, about which `_mend` decides."""
    if len(solutions) == 1:
        # `_mend` runs it anyway.
        return solutions[0]
    for solution in solutions:
        rewards = _score(replace(problem, solution=solution), options)
        if rewards["pass"] == 1:
            return solution
    return solutions[0]


def _row_of_verl(row: Any, note: Note) -> Row:
    """One of ours as it is; of verl's, the prompt as it is and the ground truth in our form."""
    source = row.get("data_source")
    if source is None or source in TASK.data_sources:
        return dict(row)
    if source not in VERLS_SOURCES:
        raise LeftOut("another task")

    prompt = row.get("prompt")
    # `SEVERAL` does not look beyond the end of a line, which the text of a list writes as \n.
    _leave_out_several(str(prompt).replace("\\n", "."))
    field = "reward_model.ground_truth"
    reward_model = row.get("reward_model")
    is_object = isinstance(reward_model, Mapping) and "ground_truth" in reward_model
    require(is_object, "reward_model", reward_model, "an object with ground_truth")
    tests = _read_json(reward_model["ground_truth"], field)
    problem = _problem(tests, field, note)
    made = make_row(TASK, "", problem.text())
    return made | {"prompt": prompt}


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
    """The problem with these tests; what is left out of them is noted."""
    problem = problem_of(tests, field, lambda why: note(f"left out, of the tests ({why})"))
    if problem is None:
        raise LeftOut("no test that can be used")
    return problem


def _mend(ground_truth: str, **options: Any) -> tuple[str, str]:
    """The ground truth, without a solution that does not run here, and what was repaired."""
    problem = parse(ground_truth)
    if problem.solution is None:
        return ground_truth, ""
    rewards = _score(problem, options)
    if rewards["pass"] == 1:
        return ground_truth, ""
    if rewards["bug"] == 1:
        raise LeftOut("its solution gives other results than its tests")
    without = replace(problem, solution=None)
    return without.text(), "its solution, which does not run here, is gone"


def _score(problem: Problem, options: Mapping[str, Any]) -> Rewards:
    """The rewards of a problem's own solution."""
    text = problem.text()
    # The wall time is long, because a busy machine must not decide which rows are kept.
    return TASK.score(TASK.good_response(text), text, wall_seconds=60.0, **options)


def _made_row(rng: Random, split: str) -> Row:
    """A synthetic row. The order of the draws decides which rows a seed gives."""
    place, operator = rng.choice(list(enumerate(OPERATORS)))
    numbers_of_split = []
    for candidate in range(2, 100):
        is_test = (candidate + place) % TEST_EVERY == 0
        if is_test == (split == "test"):
            numbers_of_split.append(candidate)
    number = rng.choice(numbers_of_split)
    is_long = rng.random() < LONG_SHARE
    inputs = rng.sample(range(-99, 100), TESTS)
    is_program = rng.random() < 0.5

    what = f"{operator} {number}"
    calculate = OPERATORS[operator]
    tests: list[dict[str, Any]]
    if is_program:
        question = f"Read n, print n {what}."
        tests = [{"input": f"{n}\n", "output": f"{calculate(n, number)}\n"} for n in inputs]
        solution = LONG_PROGRAM if is_long else SHORT_PROGRAM
        problem = Problem(None, tests, solution.format(what=what))
    else:
        question = f"Write f(n): n {what}."
        tests = [{"args": [n], "kwargs": {}, "accepted": [calculate(n, number)]} for n in inputs]
        solution = LONG_FUNCTION if is_long else SHORT_FUNCTION
        problem = Problem("f", tests, solution.format(what=what))
    return make_row(TASK, question, problem.text(), TASK.system_prompt)


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(task=TASK, row_of=_row_of, of_verl=_row_of_verl, mend=_mend, make_rows=make_rows)
