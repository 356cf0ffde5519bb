"""API-Bank, levels 1 to 3, in ToolRL's form: a dialogue, and the one call that should come next.

`--data FOLDER` has the files level-N-api_processed.json of github.com/qiancheng0/ToolRL,
benchmarks/API-Bank:

    [{"system": "...", "user": "...", "answer": [{"name": "...", "parameters": {...}}], ...}, ...]

An answer is an object, or a list of one. Two scores of a model's answer: "any call", as ToolRL's
own evaluation has it, and "all calls", our stricter one.
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_gdpo.evaluation.benchmark import Benchmark
from verl_gdpo.evaluation.questions import Column, OneAnswer, Question, Scores
from verl_gdpo.tasks.tool_rl.form import CALL_TAGS, NAME_KEY, PARAMETERS_KEY

LEVELS = (1, 2, 3)
ANY, ALL = "any call", "all calls"
WHERE = "https://github.com/qiancheng0/ToolRL/tree/main/benchmarks/API-Bank"


def questions(options: Namespace) -> Sequence[Question]:
    """Return the questions of the levels whose files are there; see `Benchmark`."""
    if not options.data or len(options.data) != 1 or not options.data[0].is_dir():
        raise ValueError(f"--data FOLDER: the folder with the files of {WHERE}")
    files = {level: options.data[0] / f"level-{level}-api_processed.json" for level in LEVELS}
    found = [
        one for level in LEVELS if files[level].exists() for one in _level(level, files[level])
    ]
    if not found:
        raise ValueError(
            f"{options.data[0]}: no {files[1].name}; --data names the folder of {WHERE}"
        )
    return found


def _level(level: int, path: Path) -> Iterator[Question]:
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: got no readable JSON ({error})") from None
    if not isinstance(items, list):
        raise ValueError(f"{path}: got a JSON {type(items).__name__}; expected a list")
    for number, item in enumerate(items):
        try:
            messages = [{"role": role, "content": _text(item, role)} for role in ("system", "user")]
            gold = _gold(item["answer"])
        except (LookupError, TypeError) as error:
            raise ValueError(f"{path}, item {number}: {error!r}; see {WHERE}") from None
        start = partial(OneAnswer, messages, partial(_score, gold=gold))
        yield Question(f"level_{level}_{number}", f"level {level}", start, json.dumps(gold))


def _text(item: Mapping[str, Any], key: str) -> str:
    if not isinstance(item[key], str):
        raise TypeError(f"{key}: got {type(item[key]).__name__}; expected str")
    return str(item[key])


def _gold(answer: Any) -> dict[str, Any]:
    """The call that is right."""
    call = answer[0] if isinstance(answer, list) and len(answer) == 1 else answer
    if not isinstance(call, dict) or not isinstance(call[PARAMETERS_KEY], dict):
        raise TypeError("answer: expected one call with a name and an object of parameters")
    return {NAME_KEY: call[NAME_KEY], PARAMETERS_KEY: call[PARAMETERS_KEY]}


def _score(text: str, _tokens: int, gold: Mapping[str, Any]) -> Scores:
    """Return both scores of an answer; see `_loose`.

    "any call" is 1 if a call is the gold one, "all calls" if it is there and no other.
    """
    calls = _calls(text)
    is_there = any(_is_gold(call, gold) for call in _loose(calls, gold))
    return {ANY: float(is_there), ALL: float(len(calls) == 1 and _is_gold(calls[0], gold))}


def _loose(calls: Sequence[Any], gold: Mapping[str, Any]) -> Iterator[Any]:
    """Yield calls as ToolRL's evaluation reads them.

    An object without a name or without parameters stands for the parameters of the gold tool, a
    text is read once more, and a number ends the search. Source: evaluate.py of the folder above.
    """
    for call in calls:
        if isinstance(call, str):
            call = next(iter(_calls(call)), None)
        if call is None or isinstance(call, bool | int | float):
            return
        is_call = isinstance(call, dict) and NAME_KEY in call and PARAMETERS_KEY in call
        yield call if is_call else {NAME_KEY: gold[NAME_KEY], PARAMETERS_KEY: call}


def _is_gold(call: Any, gold: Mapping[str, Any]) -> bool:
    try:
        found = [call[key] for key in (NAME_KEY, PARAMETERS_KEY)]
        return bool(found == [gold[NAME_KEY], gold[PARAMETERS_KEY]])
    except (LookupError, TypeError, RecursionError):
        return False


def _calls(text: str) -> list[Any]:
    """The lines of the last block of calls that are JSON; without a tag, the lines of the text."""
    block = text.split(CALL_TAGS[0])[-1].split(CALL_TAGS[1])[0]
    found = []
    for line in block.strip().split("\n"):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    return found


def columns(_questions: Sequence[Question]) -> Sequence[Column]:
    """Return both scores over all questions, by level."""
    return [
        Column(
            score,
            parts=tuple(Column(f"level {n}", category=f"level {n}", score=score) for n in LEVELS),
            by_questions=True,
        )
        for score in (ANY, ALL)
    ]


BENCHMARK = Benchmark(
    name="api_bank",
    summary="the next call of a dialogue, levels 1 to 3",
    questions=questions,
    columns=columns,
    max_tokens=4096,  # as in ToolRL's generate.py
    data_source="api_bank",
    notes=("ToolRL's own evaluation is the number 'any call'.",),
)
