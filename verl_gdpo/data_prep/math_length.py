"""Competition maths (DeepScaleR's form): from local files, or synthetic.

A file is a list of {"problem": ..., "answer": ...}, such as deepscaler.json of the Hugging Face
dataset agentica-org/DeepScaleR-Preview-Dataset, or the files of github.com/agentica-project/
deepscaler. An answer is a text, a number, or a list with one text. A problem without an answer is
left out, and said so. Other fields (solution, difficulty, ...) are not read.
"""

import argparse
import math
import re
from typing import Any

from verl_gdpo.data_prep import DataError, LeftOut
from verl_gdpo.data_prep.local_files import make_row
from verl_gdpo.data_prep.math_length_synthetic import make_rows
from verl_gdpo.data_prep.progress import Progress
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
    answer = _answer_of(item.get("answer"), where)
    return make_row(TASK, f"{problem.strip()}\n\n{INSTRUCTION}", answer)


def _answer_of(value: Any, where: str) -> str:
    if isinstance(value, list) and len(value) == 1:
        (value,) = value
    if value is None:
        raise LeftOut("no answer")
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)  # 142.0 in a file is 142 in the contest
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        value = str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}, field answer: got {repr(value)[:80]}; expected a text, a finite number, or "
            "a list with one of them"
        )
    return DOLLAR.sub("", value).strip()


SOURCES = Sources(task=TASK, row_of=_row_of_problem)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the rows come from."""
    SOURCES.add_arguments(parser)


def load(args: argparse.Namespace, _task: Task) -> Splits:
    """Return the rows of both files, whose ground truths math-verify can read.

    Raises:
        DataError: it cannot read one; and what `Sources.load` raises.
    """
    splits = SOURCES.load(args, make_rows)
    files = {"train": args.source, "test": args.test or args.source}
    for split, rows in splits.items():
        progress = Progress(f"reading the {split} answers with math-verify", len(rows), "answers")
        for number, row in enumerate(rows):
            progress.at(number)
            gold = row["reward_model"]["ground_truth"]
            try:
                are_equal(gold, gold)
            except ValueError as error:
                field = "reward_model.ground_truth"
                where = f"{files[split] or 'made rows'}, {split} row {number}"
                raise DataError(f"{where}, field {field}: {error}") from error
    return splits
