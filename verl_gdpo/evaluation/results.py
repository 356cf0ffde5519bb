"""What an evaluation leaves: the result, a table, and the answers as a rollout dump.

OUT/result.json          the numbers with intervals, the settings, the scores of each question
OUT/rollouts/STEP.jsonl  the answers, which `verl-gdpo replay` reads
OUT/metrics/1.jsonl      the means as a validation of verl, for `verl-gdpo report` and `summary`
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.evaluation.benchmark import Benchmark
from verl_gdpo.evaluation.dialogues import Dialogue
from verl_gdpo.evaluation.numbers import QuestionScores, numbers
from verl_gdpo.evaluation.questions import ScoreColumn
from verl_gdpo.evaluation.records import read_json, write_json
from verl_gdpo.terminal import printable, render

RESULT = "result.json"
NOTHING = "-"  # in a table: it was not run


def result_of(
    benchmark: Benchmark,
    dialogues: Sequence[Dialogue],
    settings: Mapping[str, Any],
    policy: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what `result.json` holds.

    Args:
        dialogues: all of them, after their ends.
    """
    problems = problems_of(dialogues)
    columns = benchmark.columns([one.question for one in dialogues if one.sample == 0])
    records = [record for one in dialogues for record in one.records]
    answers = [record.answer for record in records if record.answer is not None]
    return {
        "bench": benchmark.name,
        "policy": dict(policy),
        "settings": dict(settings),
        "numbers": [asdict(one) for one in numbers(columns, [*problems.values()])],
        "percent": benchmark.percent,
        "questions": len(problems),
        "dialogues": len(dialogues),
        "answers": len(answers),
        "share_cut": sum(one.is_cut for one in answers) / len(answers) if answers else None,
        "too_long": sum(one.is_too_long for one in dialogues),
        "notes": list(benchmark.notes),
        "columns": [asdict(column) for column in columns],
        "problems": {key: asdict(problem) for key, problem in problems.items()},
    }


def problems_of(dialogues: Sequence[Dialogue]) -> dict[str, QuestionScores]:
    """Return {key: scores of the question}, each the mean over its samples.

    Raises:
        ValueError: the samples of a question have different scores.
    """
    of_key: dict[str, list[Dialogue]] = {}
    for dialogue in dialogues:
        of_key.setdefault(dialogue.question.key, []).append(dialogue)
    return {key: _problem(key, samples) for key, samples in of_key.items()}


def _problem(key: str, samples: Sequence[Dialogue]) -> QuestionScores:
    scores = [one.scores for one in samples]
    if any(one.keys() != scores[0].keys() for one in scores):
        raise ValueError(f"question {key}: its samples have the scores {[*map(sorted, scores)]}")
    mean = {name: sum(one[name] for one in scores) / len(scores) for name in scores[0]}
    totals: dict[str, tuple[float, int]] = {}
    for of_answer in (scores for one in samples for scores in one.of_answers):
        for name, value in of_answer.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = total + value, count + 1
    return QuestionScores(samples[0].question.category, mean, totals)


def write(
    folder: Path, result: Mapping[str, Any], dialogues: Sequence[Dialogue], source: str, step: int
) -> None:
    """Write the three files; see the module's docstring."""
    path = folder / "rollouts" / f"{step}.jsonl"
    with replace_together(path) as (temporary,), temporary.open("w", encoding="utf-8") as file:
        for dialogue in dialogues:
            for row in _rows(dialogue, source, step):
                file.write(json.dumps(row) + "\n")
    _write_metrics(folder / "metrics" / "1.jsonl", result, source, step)
    write_json(folder / RESULT, result)


def _write_metrics(path: Path, result: Mapping[str, Any], source: str, step: int) -> None:
    """Write one line of verl's file logger: the mean of each score over each category."""
    values: dict[tuple[str, str], list[float]] = {}
    for problem in result["problems"].values():
        for name, value in problem["scores"].items():
            values.setdefault((problem["category"], name), []).append(value)
    samples = result["settings"]["samples"]
    data = {
        f"val-aux/{_source(source, category)}/{name}/mean@{samples}": sum(scores) / len(scores)
        for (category, name), scores in values.items()
    }
    with replace_together(path) as (temporary,):
        temporary.write_text(json.dumps({"step": step, "data": data}) + "\n", encoding="utf-8")


def _source(source: str, category: str) -> str:
    """The data source of a category: the categories of one benchmark have scores of their own."""
    return source if category == source else f"{source}/{category}"


def _rows(dialogue: Dialogue, source: str, step: int) -> Iterator[dict[str, Any]]:
    """The answers of a dialogue in the form of `run/dump_reader.py`, which sees it as a session."""
    question, scores = dialogue.question, dict(dialogue.scores)
    for turn, record in enumerate(dialogue.records):
        answer = record.answer
        tokens = 0 if answer is None else answer.tokens
        yield {
            "input": record.input,
            "output": "" if answer is None else answer.text,
            "gts": question.ground_truth,
            "score": sum(scores.values()),
            "step": step,
            "uid": f"{question.key}_{dialogue.sample}_{turn}",
            "group": question.key,
            "session": dialogue.sample,
            "data_source": _source(source, question.category),
            "response_tokens": tokens,
            "trained_tokens": tokens,
            "rewards": scores,
            "advantage": None,
            "is_padding": False,
        }


def table(result: Mapping[str, Any]) -> str:
    """Return the numbers of a result as text, and what has to be known beside them."""
    rows = [
        (name, *shown(one, result["percent"]), f"{one['questions']:,}")
        for name, one in flat(result["numbers"])
    ]
    header = ("%" if result["percent"] else "", "value", "95 % interval", "questions")
    return "\n".join(["", render(header, rows), "", *_remarks(result)])


def flat(several: Sequence[Mapping[str, Any]], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the names of numbers, and of those below them, which are indented."""
    for number in several:
        yield "  " * depth + printable(number["name"]), number
        yield from flat(number.get("parts", ()), depth + 1)


def shown(number: Mapping[str, Any], percent: bool) -> tuple[str, str]:
    """Return a number and its interval as a table has them."""
    if number["value"] is None:
        return NOTHING, NOTHING
    values = (number["value"], *number["interval"])
    value, low, high = (f"{100 * one:.2f}" if percent else f"{one:.3f}" for one in values)
    return value, f"{low} to {high}"


def _remarks(result: Mapping[str, Any]) -> Iterator[str]:
    settings = result["settings"]
    samples, temperature = settings["samples"], settings["temperature"]
    if samples > 1:
        yield (
            f"avg@{samples}: {samples} samples of one policy at temperature {temperature:g}. They "
            "are no training seeds: another training can end elsewhere."
        )
    else:
        yield "pass@1: " + (f"temperature {temperature:g}" if temperature else "greedy") + "."
    cut = result["share_cut"]
    yield (
        f"answers: {result['answers']:,}, "
        + ("" if cut is None else f"{100 * cut:.1f} % of them ")
        + f"cut at {settings['max_tokens']:,} tokens; "
        f"{result['too_long']:,} of {result['dialogues']:,} dialogues wrong because a prompt was "
        "too long for the model."
    )
    yield from result["notes"]


def read_result(path: Path) -> dict[str, Any]:
    """Return a result, given its file or its folder; raise ValueError if it is none."""
    result = read_json(path / RESULT if path.is_dir() else path)
    if absent := {"bench", "settings", "columns", "problems", "percent"} - result.keys():
        raise ValueError(f"{path}: no {sorted(absent)}; expected {RESULT} of `verl-gdpo evaluate`")
    return result


def column_of(plain: Mapping[str, Any]) -> ScoreColumn:
    """Return a column as `result.json` holds it."""
    return ScoreColumn(**{**plain, "parts": tuple(column_of(part) for part in plain["parts"])})
