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

# would be part of the problem, if they said something; OlympiadBench has them
PARTS_OF_THE_PROBLEM = ("context", "image", "images")
HIGHEST, TEST_EVERY = 20, 4  # of the synthetic sums: the numbers, and of their pairs
DOLLAR = re.compile(r"(?<!\\)\$")  # one that marks maths; the sign is \$
COMMA = r"(?:\{,\}|,(?:\\[!,;: ]\s*|\s+(?=0))?)"  # of thousands; no number begins with 0
NUMBER = re.compile(rf"-?(?:\\\$)?\d{{1,3}}(?:{COMMA}\d{{3}})+(?:\.\d+)?")


def _row_of_problem(item: Any, *_: Any) -> Row:
    require(isinstance(item, dict), "", item, "an object")
    problem, value = item.get("problem"), item.get("answer")
    require(isinstance(problem, str) and bool(problem.strip()), "problem", problem, "some text")
    for name in PARTS_OF_THE_PROBLEM:
        require(not item.get(name), name, item.get(name), "null: it is not read")
    values = value if isinstance(value, list) else [value]
    texts = [_text_of(one) for one in values]
    require(None not in texts, "answer", value, "a text, a finite number, or a list of them")
    try:
        answer = _one_of([text for text in texts if text])
    except ValueError as error:
        raise ValueError(f"field answer: {error}") from error
    return make_row(TASK, f"{problem.strip()}\n\n{INSTRUCTION}", answer)


def _text_of(value: Any) -> str | None:
    """The answer as a text, "" if there is none; None for a value of another kind."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 142.0 in a file is 142 in the contest
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    return DOLLAR.sub("", value).strip() if isinstance(value, str) else None


def _one_of(texts: list[str]) -> str:
    """The first, if math-verify takes all for equal; raises ValueError if it is no answer."""
    if not texts:
        raise LeftOut("no answer")
    first, *others = texts
    if has_split_number(first):
        raise LeftOut("numbers side by side in the answer, which may be one or several")
    TASK.check_ground_truth(first)
    if not all(are_equal(joined(text), joined(first)) for text in others):
        raise LeftOut("several answers that math-verify does not take for equal")
    return first


def _mend(ground_truth: str) -> tuple[str, str]:
    """The answer as math-verify reads it right; raises ValueError if it cannot read it."""
    answer = joined(ground_truth)
    plain = re.sub(COMMA, "", answer) if NUMBER.fullmatch(answer) else answer
    if not are_equal(plain, answer):
        raise LeftOut("math-verify reads the answer otherwise than it is meant")
    return answer, "" if answer == ground_truth else "thousands apart in the answer"


def _made_row(rng: Random, split: str) -> Row:
    while True:
        first, second = rng.randint(0, HIGHEST), rng.randint(0, HIGHEST)
        if ((first + 2 * second) % TEST_EVERY == TEST_EVERY - 1) == (split == "test"):
            problem = f"What is {first} + {second}?\n\n{INSTRUCTION}"
            return make_row(TASK, problem, str(first + second))


make_rows = seeded(TASK.name, _made_row)
SOURCES = Sources(task=TASK, row_of=_row_of_problem, mend=_mend, make_rows=make_rows)
