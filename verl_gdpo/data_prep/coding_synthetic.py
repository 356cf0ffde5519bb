"""One-line problems for the CPU run of coding, made from a seed without any download.

    Read n, print n + 12.               print(int(input()) + 12)
    Write f(n): n * 7.                  def f(n):
                                            return n * 7

Half of the solutions take a line more than they need, and nothing in the problem says which: a
policy that learned from them has something to gain from the length reward. The test split uses
pairs of operator and number that the train split never shows.
"""

from random import Random

from verl_gdpo.data_prep.local_files import make_row
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.rewards.coding import TASK
from verl_gdpo.rewards.coding_problem import Problem

OPERATORS = ("+", "-", "*")
LONG_SHARE = 0.5
TESTS = 4
TEST_EVERY = 5  # of the pairs
PRINTS = ("print(int(input()) {what})", "n = int(input())\nr = n {what}\nprint(r)")
RETURNS = ("def f(n):\n    return n {what}", "def f(n):\n    r = n {what}\n    return r")


def make_rows(count: int, *, split: str, seed: int) -> list[Row]:
    """Return `count` rows; row i depends on i, seed and split alone, so that more continue fewer.

    Args:
        count: at least 1.
        split: "train" or "test"; says which pairs may occur.
        seed: at least 0.
    """
    return [_row(index, split, seed) for index in range(count)]


def _row(index: int, split: str, seed: int) -> Row:
    # a string seeds Random through SHA-512: the same in every process, unlike hash()
    rng = Random(f"verl-gdpo coding {split} {seed} {index}")
    operator = rng.choice(OPERATORS)
    place = OPERATORS.index(operator)
    is_test = split == "test"
    numbers = [n for n in range(2, 100) if ((n + place) % TEST_EVERY == 0) == is_test]
    number = rng.choice(numbers)
    is_long = rng.random() < LONG_SHARE
    what = f"{operator} {number}"
    given = rng.sample(range(-99, 100), TESTS)
    results = [_result(n, operator, number) for n in given]
    pairs = list(zip(given, results, strict=True))
    if rng.random() < 0.5:
        tests = [{"input": f"{n}\n", "output": f"{result}\n"} for n, result in pairs]
        problem = Problem(None, tests, PRINTS[is_long].format(what=what))
        return make_row(TASK, f"Read n, print n {what}.", problem.text(), TASK.system_prompt)
    calls = [{"args": [n], "kwargs": {}, "accepted": [result]} for n, result in pairs]
    problem = Problem("f", calls, RETURNS[is_long].format(what=what))
    return make_row(TASK, f"Write f(n): n {what}.", problem.text(), TASK.system_prompt)


def _result(n: int, operator: str, number: int) -> int:
    return {"+": n + number, "-": n - number, "*": n * number}[operator]
