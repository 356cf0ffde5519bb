"""Competition maths (DeepScaleR's form): from local files, or synthetic.

A file is a list of {"problem": ..., "answer": ...}, such as deepscaler.json of the Hugging Face
dataset agentica-org/DeepScaleR-Preview-Dataset, or the files of github.com/agentica-project/
deepscaler. An answer is a text, a number, or a list of them that are equal for math-verify, which
reads each answer once, here. A problem without an answer, or with several, is left out, and said
so. Other fields (solution, difficulty, ...) are not read.
"""

import argparse
import math
import re
from typing import Any

from verl_gdpo.data_prep import DataError, LeftOut
from verl_gdpo.data_prep.local_files import make_row
from verl_gdpo.data_prep.math_length_synthetic import make_rows
from verl_gdpo.data_prep.schema import Row, Splits
from verl_gdpo.data_prep.sources import Sources
from verl_gdpo.rewards.math_length import INSTRUCTION, TASK
from verl_gdpo.rewards.math_length_pool import are_equal
from verl_gdpo.rewards.task import Task

# would be part of the problem, if they said something; OlympiadBench has them
PARTS_OF_THE_PROBLEM = ("context", "image", "images")
DOLLAR = re.compile(r"(?<!\\)\$")  # one that marks maths; the sign is \$


def _row_of_problem(item: Any, where: str) -> Row:
    if not isinstance(item, dict):
        raise DataError(f"{where}, the whole row: got {repr(item)[:80]}; expected an object")
    problem = item.get("problem")
    if not isinstance(problem, str) or not problem.strip():
        raise DataError(f"{where}, field problem: got {repr(problem)[:80]}; expected some text")
    for name in PARTS_OF_THE_PROBLEM:
        if item.get(name):
            got = repr(item[name])[:80]
            raise DataError(f"{where}, field {name}: got {got}; expected null: it is not read")
    value = item.get("answer")
    texts = [_text_of(one) for one in (value if isinstance(value, list) else [value])]
    if None in texts:
        raise DataError(
            f"{where}, field answer: got {repr(value)[:80]}; expected a text, a finite number, or "
            "a list of them"
        )
    try:
        answer = _one_of([text for text in texts if text])
    except ValueError as error:
        raise DataError(f"{where}, field answer: {error}") from error
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
    """The first, if math-verify takes all for equal; raises ValueError if it cannot read it."""
    if not texts:
        raise LeftOut("no answer")
    first = texts[0]
    TASK.check_ground_truth(first)
    if not all(are_equal(text, first) for text in texts):
        raise LeftOut("several answers that math-verify does not take for equal")
    return first


SOURCES = Sources(task=TASK, row_of=_row_of_problem)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the rows come from."""
    SOURCES.add_arguments(parser)


def load(args: argparse.Namespace, _task: Task) -> Splits:
    """Return the checked rows of both files; raises what `Sources.load` does."""
    return SOURCES.load(args, make_rows)
