"""What an evaluation leaves: the result, a table, and the answers as a rollout dump.

OUT/result.json          the numbers with intervals, the settings, the scores of each question
OUT/rollouts/STEP.jsonl  the answers, which `verl-gdpo replay` reads
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.evaluation import Benchmark, Scores
from verl_gdpo.evaluation.dialogues import Dialogue
from verl_gdpo.evaluation.numbers import Number, QuestionScores, numbers
from verl_gdpo.terminal import printable, render

RESULT = "result.json"
OF_THE_POLICY = ("policy", "step")  # settings that may differ between two results without a word


def write(
    folder: Path, benchmark: Benchmark, dialogues: Sequence[Dialogue], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write both files, whole or not at all; return what `result.json` holds.

    Args:
        dialogues: all of them, after their ends.
    """
    problems = problems_of(dialogues)
    answers = [record.answer for one in dialogues for record in one.records]
    result = {
        "bench": benchmark.name,
        "settings": settings,
        "numbers": [asdict(one) for one in numbers(benchmark.columns, [*problems.values()])],
        "dialogues": len(dialogues),
        "answers": sum(one is not None for one in answers),
        "cut": sum(one is not None and one.is_cut for one in answers),
        "too_long": sum(one is None for one in answers),
        "notes": benchmark.notes,
        "problems": {key: asdict(problem) for key, problem in problems.items()},
    }
    dump = folder / "rollouts" / f"{settings['step']}.jsonl"
    with replace_together(dump, folder / RESULT) as (lines, summary):
        with lines.open("w", encoding="utf-8") as file:
            for one in dialogues:
                for row in _rows(one, benchmark.data_source, settings["step"]):
                    file.write(json.dumps(row) + "\n")
        summary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def problems_of(dialogues: Sequence[Dialogue]) -> dict[str, QuestionScores]:
    """Return {key: scores of the question}, each the mean over its samples."""
    of_key: dict[str, list[Dialogue]] = {}
    for dialogue in dialogues:
        of_key.setdefault(dialogue.question.key, []).append(dialogue)
    return {key: _problem(samples) for key, samples in of_key.items()}


def _problem(samples: Sequence[Dialogue]) -> QuestionScores:
    whole = _totals(one.outcome.scores for one in samples)
    mean = {name: total / count for name, (total, count) in whole.items()}
    of_answers = (scores for one in samples for scores in one.outcome.of_answers)
    return QuestionScores(samples[0].question.category, mean, _totals(of_answers))


def _totals(several: Iterable[Scores]) -> dict[str, tuple[float, int]]:
    """{score: (its sum, how often it is there)}"""
    totals: dict[str, tuple[float, int]] = {}
    for scores in several:
        for name, value in scores.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = total + value, count + 1
    return totals


def _rows(dialogue: Dialogue, source: str, step: int) -> Iterator[dict[str, Any]]:
    """The answers of a dialogue in the form of `run/dump_reader.py`, which sees it as a session."""
    question, scores = dialogue.question, dict(dialogue.outcome.scores)
    for turn, (text, answer) in enumerate(dialogue.records):
        tokens = 0 if answer is None else answer.tokens
        yield {
            "input": text,
            "output": "" if answer is None else answer.text,
            "gts": question.ground_truth,
            "score": sum(scores.values()),
            "step": step,
            "uid": f"{question.key}_{dialogue.sample}_{turn}",
            "group": question.key,
            "session": dialogue.sample,
            # the categories of one benchmark may have other scores
            "data_source": source
            if question.category == source
            else f"{source}/{question.category}",
            "response_tokens": tokens,
            "trained_tokens": tokens,
            "rewards": scores,
            "advantage": None,
            "is_padding": False,
        }


def table(result: Mapping[str, Any], percent: bool) -> str:
    """Return the numbers of a result as text, and what has to be known beside them."""
    made = [Number(**one) for one in result["numbers"]]
    rows = [(one.name, *_shown(one, percent), f"{one.questions:,}") for one in made]
    header = ("%" if percent else "", "value", "95 % interval", "questions")
    settings = result["settings"]
    kind, samples = "avg" if settings["samples"] > 1 else "pass", settings["samples"]
    remarks = (
        f"{kind}@{samples} at temperature {settings['temperature']:g}, of one policy: another "
        "training seed can end elsewhere.",
        f"answers: {result['answers']:,}, {result['cut']:,} of them cut at "
        f"{settings['max_tokens']:,} tokens; {result['too_long']:,} of {result['dialogues']:,} "
        "dialogues wrong because a prompt was too long for the model.",
    )
    return "\n".join(["", render(header, rows), "", *remarks, *result["notes"]])


def _shown(number: Number, percent: bool) -> tuple[str, str]:
    """A number and its interval as a table has them; "-" was not run."""
    if number.value is None or number.interval is None:
        return "-", "-"
    values = (number.value, *number.interval)
    value, low, high = (f"{100 * one:.2f}" if percent else f"{one:.3f}" for one in values)
    return value, f"{low} to {high}"


def compare(benchmarks: Mapping[str, Benchmark], paths: Sequence[Path]) -> str:
    """Return a table: each result of one benchmark, and its difference from the first one.

    The intervals of the differences are paired by problem.

    Raises:
        ValueError: a file is no result, or the results are of other questions.
    """
    results = [_read(path, benchmarks) for path in paths]
    first, benchmark = results[0], benchmarks[results[0]["bench"]]
    for path, result in zip(paths, results, strict=True):
        if result["settings"]["questions"] != first["settings"]["questions"]:
            raise ValueError(
                f"{path}: {result['bench']} with other questions than {first['bench']} in "
                f"{paths[0]}; results are compared on the same ones"
            )
    columns, percent = benchmark.columns, benchmark.percent
    base, *others = (
        [QuestionScores(**one["problems"][key]) for key in first["problems"]] for one in results
    )
    header = ["%" if percent else "", "1"]
    rows = [[one.name, _shown(one, percent)[0]] for one in numbers(columns, base)]
    for k, other in enumerate(others, 2):
        header += [str(k), f"{k} less 1", "95 % interval"]
        pairs = zip(numbers(columns, other), numbers(columns, other, less=base), strict=True)
        for row, (value, change) in zip(rows, pairs, strict=True):
            row += [_shown(value, percent)[0], *_shown(change, percent)]
    names = [
        printable(f"{k}  {path}: {one['settings']['policy']}, step {one['settings']['step']}")
        for k, (path, one) in enumerate(zip(paths, results, strict=True), 1)
    ]
    return "\n".join([*names, "", render(header, rows), "", *_warnings(results)])


def _read(path: Path, benchmarks: Mapping[str, Benchmark]) -> dict[str, Any]:
    """A result, given its file or its folder."""
    file = path / RESULT if path.is_dir() else path
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        _ = benchmarks[result["bench"]], result["problems"], result["settings"]["policy"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{file}: no {RESULT} of `verl-gdpo evaluate`: {error!r}") from None
    return result


def _warnings(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What else differs between the results, because it can move a number as the policy does."""
    first = results[0]["settings"]
    for number, result in enumerate(results[1:], 2):
        other = result["settings"]
        for key in sorted({*first, *other} - {*OF_THE_POLICY}):
            if first.get(key) != other.get(key):
                yield f"WARNING: {key} is {first.get(key)} in 1, {other.get(key)} in {number}"
