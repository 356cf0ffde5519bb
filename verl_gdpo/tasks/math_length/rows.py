"""Competition maths (DeepScaleR's form): from local files, or synthetic.

A file is a list of {"problem": ..., "answer": ...}, such as deepscaler.json of the Hugging Face
dataset agentica-org/DeepScaleR-Preview-Dataset, or the files of github.com/agentica-project/
deepscaler. An answer is a text, a number, or a list of them that are equal for math-verify, which
reads each answer here, in two spellings. A problem without an answer, with several, or with one
that it does not read as it is meant, is left out, and said so. Other fields (solution, difficulty,
...) are not read.

Synthetic problems are short sums, as `What is 7 + 8?`. The test split uses ordered pairs of numbers
that the train split never shows.
"""

import math
import re
from random import Random
from typing import Any

from verl_gdpo.tasks.math_length.score import INSTRUCTION, TASK, are_equal, has_split_number, joined
from verl_gdpo.tasks.preparation import LeftOut
from verl_gdpo.tasks.preparation.schema import Row, require
from verl_gdpo.tasks.preparation.sources import Sources, make_row, seeded

# These fields of OlympiadBench would be part of the problem, if they said something.
PARTS_OF_THE_PROBLEM = ("context", "image", "images")
HIGHEST = 20  # The largest number of a synthetic sum.
TEST_EVERY = 4  # One in so many pairs of them belongs to the test split.
DOLLAR = re.compile(r"(?<!\\)\$")  # It marks maths. The sign of money is \$.
# Between thousands. A space may follow only where a 0 does, since no other number begins with it.
COMMA = r"(?:\{,\}|,(?:\\[!,;: ]\s*|\s+(?=0))?)"
NUMBER = re.compile(rf"-?(?:\\\$)?\d{{1,3}}(?:{COMMA}\d{{3}})+(?:\.\d+)?")


def _row_of_problem(item: Any, *_: Any) -> Row:
    """The row of {"problem": ..., "answer": ...}."""
    require(isinstance(item, dict), "", item, "an object")
    problem = item.get("problem")
    require(isinstance(problem, str) and bool(problem.strip()), "problem", problem, "some text")
    for name in PARTS_OF_THE_PROBLEM:
        part = item.get(name)
        require(not part, name, part, "null: it is not read")
    texts = _texts_of(item.get("answer"))
    try:
        answer = _one_of(texts)
    except ValueError as error:
        raise ValueError(f"field answer: {error}") from error
    return make_row(TASK, f"{problem.strip()}\n\n{INSTRUCTION}", answer)


def _texts_of(value: Any) -> list[str]:
    """The answers of a field as texts, without empty ones."""
    values = value if isinstance(value, list) else [value]
    texts = []
    for one in values:
        text = _text_of(one)
        require(text is not None, "answer", value, "a text, a finite number, or a list of them")
        if text:
            texts.append(text)
    return texts


def _text_of(value: Any) -> str | None:
    """The answer as a text, "" if there is none; None for a value of another kind."""
    if value is None:
        return ""
    if isinstance(value, str):
        return DOLLAR.sub("", value).strip()
    # A bool is an int in Python.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # 142.0 in a file is 142 in the contest.
        return str(int(value)) if value.is_integer() else str(value)
    return None


def _one_of(texts: list[str]) -> str:
    """The first, if math-verify takes all for equal; raises ValueError if it is no answer."""
    if not texts:
        raise LeftOut("no answer")
    first = texts[0]
    if has_split_number(first):
        raise LeftOut("numbers side by side in the answer, which may be one or several")
    TASK.check_ground_truth(first)
    for other in texts[1:]:
        if not are_equal(joined(other), joined(first)):
            raise LeftOut("several answers that math-verify does not take for equal")
    return first


def _mend(ground_truth: str) -> tuple[str, str]:
    """The answer as math-verify reads it right, and what was repaired.

    Raises:
        LeftOut: math-verify reads it otherwise than it is meant.
        ValueError: math-verify cannot read it.
    """
    answer = joined(ground_truth)
    # A whole answer with commas is one number. math-verify may read several.
    plain = answer
    if NUMBER.fullmatch(answer):
        plain = re.sub(COMMA, "", answer)
    if not are_equal(plain, answer):
        raise LeftOut("math-verify reads the answer otherwise than it is meant")
    if answer == ground_truth:
        return answer, ""
    return answer, "thousands apart in the answer"


def _made_row(rng: Random, split: str) -> Row:
    """A synthetic row: pairs of numbers are drawn until one belongs to the split."""
    while True:
        first = rng.randint(0, HIGHEST)
        second = rng.randint(0, HIGHEST)
        is_test = (first + 2 * second) % TEST_EVERY == TEST_EVERY - 1
        if is_test == (split == "test"):
            problem = f"What is {first} + {second}?\n\n{INSTRUCTION}"
            return make_row(TASK, problem, str(first + second))


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(task=TASK, row_of=_row_of_problem, mend=_mend, make_rows=make_rows)
