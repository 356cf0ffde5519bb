"""What an evaluation leaves: the result, a table, and the answers as a dump.

OUT/result.json          the numbers with intervals, the settings, the scores of each question
OUT/rollouts/STEP.jsonl  the answers, which `verl-gdpo replay` reads
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_gdpo.atomic import replace_together
from verl_gdpo.terminal import printable, render, short_number
from verl_gdpo.tools.evaluate.benchmark import Benchmark, Scores
from verl_gdpo.tools.evaluate.dialogues import Dialogue
from verl_gdpo.tools.evaluate.numbers import Number, QuestionScores, numbers

RESULT = "result.json"
# These settings may differ between two results without a word.
OF_THE_POLICY = ("policy", "step")


def write(
    folder: Path, benchmark: Benchmark, dialogues: Sequence[Dialogue], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Write both files, whole or not at all; return what `result.json` holds.

    Args:
        dialogues: all of them, after their ends.
    """
    result = _result(benchmark, dialogues, settings)
    dump = folder / "rollouts" / f"{settings['step']}.jsonl"
    with replace_together(dump, folder / RESULT) as (lines, summary):
        with lines.open("w", encoding="utf-8") as file:
            for one in dialogues:
                for row in _rows(one, benchmark.data_source, settings["step"]):
                    file.write(json.dumps(row) + "\n")
        summary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _result(
    benchmark: Benchmark, dialogues: Sequence[Dialogue], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `result.json` holds."""
    problems = problems_of(dialogues)
    numbers_of_table = numbers(benchmark.columns, list(problems.values()))
    records = [record for dialogue in dialogues for record in dialogue.records]
    answers = [record.answer for record in records if record.answer is not None]
    return {
        "bench": benchmark.name,
        "settings": settings,
        "numbers": [asdict(number) for number in numbers_of_table],
        "dialogues": len(dialogues),
        "answers": len(answers),
        "cut": sum(answer.is_cut for answer in answers),
        "too_long": len(records) - len(answers),
        "notes": list(benchmark.notes) + _notes_of_turns(dialogues),
        "problems": {key: asdict(problem) for key, problem in problems.items()},
    }


def _notes_of_turns(dialogues: Sequence[Dialogue]) -> list[str]:
    """Return what has to be known of dialogues with several turns; none without any."""
    count = sum(one.has_earlier_turns for one in dialogues)
    if count == 0:
        return []
    return [
        f"{count:,} of {len(dialogues):,} dialogues have earlier turns of an assistant. The chat "
        "template renders them anew for each prompt, and many templates then drop their thoughts. "
        "Rollouts of verl go on with the tokens as they were sampled."
    ]


def problems_of(dialogues: Sequence[Dialogue]) -> dict[str, QuestionScores]:
    """Return {key: scores of the question}, each the mean over its samples."""
    of_key: dict[str, list[Dialogue]] = {}
    for dialogue in dialogues:
        of_key.setdefault(dialogue.question.key, []).append(dialogue)
    return {key: _problem(samples) for key, samples in of_key.items()}


def _problem(samples: Sequence[Dialogue]) -> QuestionScores:
    """Return the scores of the question that all these dialogues are about."""
    totals = _totals(sample.outcome.scores for sample in samples)
    means = {name: total / count for name, (total, count) in totals.items()}
    of_answers = (scores for sample in samples for scores in sample.outcome.of_answers)
    return QuestionScores(samples[0].question.category, means, _totals(of_answers))


def _totals(several: Iterable[Scores]) -> dict[str, tuple[float, int]]:
    """Return {score: (its sum, how often it is there)}."""
    totals: dict[str, tuple[float, int]] = {}
    for scores in several:
        for name, value in scores.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = total + value, count + 1
    return totals


def _rows(dialogue: Dialogue, source: str, step: int) -> Iterator[dict[str, Any]]:
    """Yield the answers of a dialogue as `tools/run_folder/dump_reader.py` reads them.

    All answers of a dialogue are one session.
    """
    question = dialogue.question
    scores = dict(dialogue.outcome.scores)
    # The categories of one benchmark may have other scores.
    data_source = source
    if question.category != source:
        data_source = f"{source}/{question.category}"
    for turn, record in enumerate(dialogue.records):
        output = ""
        tokens = 0
        as_scored = None
        if record.answer is not None:
            output = record.answer.text
            tokens = record.answer.tokens
            as_scored = record.answer.response.for_dump(output)
        yield {
            "input": record.input,
            "output": output,
            "gts": question.ground_truth,
            "score": sum(scores.values()),
            "step": step,
            "uid": f"{question.key}_{dialogue.sample}_{turn}",
            "group": question.key,
            "session": dialogue.sample,
            "data_source": data_source,
            "response_tokens": tokens,
            "trained_tokens": tokens,
            "as_scored": as_scored,
            "rewards": scores,
            "advantage": None,
            "is_padding": False,
        }


def table(result: Mapping[str, Any], percent: bool) -> str:
    """Return the numbers of a result as text, and what has to be known beside them."""
    header = (_unit(percent), "value", "95 % interval", "questions")
    rows = []
    for one in result["numbers"]:
        number = Number(**one)
        value, interval = _shown(number, percent)
        rows.append((number.name, value, interval, f"{number.questions:,}"))

    settings = result["settings"]
    kind = "pass"
    if settings["samples"] > 1:
        kind = "avg"
    lines = [
        "",
        render(header, rows),
        "",
        f"{kind}@{settings['samples']} at temperature {settings['temperature']:g}, of one policy: "
        "another training seed can end elsewhere.",
        f"answers: {result['answers']:,}, {result['cut']:,} of them cut at "
        f"{settings['max_tokens']:,} tokens; {result['too_long']:,} of {result['dialogues']:,} "
        "dialogues wrong because a prompt was too long for the model.",
    ]
    lines.extend(result["notes"])
    return "\n".join(lines)


def _unit(percent: bool) -> str:
    """Return the unit of the numbers of a table, for the corner of its header."""
    if percent:
        return "%"
    return ""


def _shown(number: Number, percent: bool) -> tuple[str, str]:
    """Return a number and its interval as a table has them; "-" is not known."""
    if number.value is None:
        return "-", "-"
    value = _as_text(number.value, percent)
    if number.interval is None:
        return value, "-"
    low, high = number.interval
    return value, f"{_as_text(low, percent)} to {_as_text(high, percent)}"


def _as_text(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.2f}"
    return short_number(value)


def compare(benchmark_of: Callable[[Mapping[str, Any]], Benchmark], paths: Sequence[Path]) -> str:
    """Return a table: each result of one benchmark, and its difference from the first one.

    The intervals of the differences are paired by problem.

    Args:
        benchmark_of: returns the benchmark of a result; it raises LookupError for another one.

    Raises:
        ValueError: a file is no result, or the results are of other questions.
    """
    results = [_read(path, benchmark_of) for path in paths]
    first = results[0]
    benchmark = benchmark_of(first)
    for path, result in zip(paths, results, strict=True):
        if result["settings"]["questions"] != first["settings"]["questions"]:
            raise ValueError(
                f"{path}: {result['bench']} with other questions than {first['bench']} in "
                f"{paths[0]}; results are compared on the same ones"
            )

    lines = []
    for number, (path, result) in enumerate(zip(paths, results, strict=True), 1):
        settings = result["settings"]
        name = f"{number}  {path}: {settings['policy']}, step {settings['step']}"
        lines.append(printable(name))
    lines.append("")
    lines.append(_comparison(benchmark, results))
    lines.append("")
    lines.extend(_warnings(results))
    return "\n".join(lines)


def _comparison(benchmark: Benchmark, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `compare`; the results are of the same questions."""
    percent = benchmark.percent
    keys = list(results[0]["problems"])
    problems = []
    for result in results:
        problems.append([QuestionScores(**result["problems"][key]) for key in keys])
    base = problems[0]

    header = [_unit(percent), "1"]
    rows = []
    for number in numbers(benchmark.columns, base):
        value, _ = _shown(number, percent)
        rows.append([number.name, value])
    for place, other in enumerate(problems[1:], 2):
        header.extend([str(place), f"{place} less 1", "95 % interval"])
        values = numbers(benchmark.columns, other)
        changes = numbers(benchmark.columns, other, less=base)
        for row, number, change in zip(rows, values, changes, strict=True):
            value, _ = _shown(number, percent)
            difference, interval = _shown(change, percent)
            row.extend([value, difference, interval])
    return render(header, rows)


def _read(path: Path, benchmark_of: Callable[[Mapping[str, Any]], Benchmark]) -> dict[str, Any]:
    """Return a result, given its file or its folder.

    Raises:
        ValueError: the file cannot be read, or is another one.
    """
    file = path
    if path.is_dir():
        file = path / RESULT
    try:
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        # Another JSON file lacks one of these.
        _ = benchmark_of(result)
        _ = result["problems"]
        _ = result["settings"]["policy"]
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{file}: no {RESULT} of `verl-gdpo evaluate`: {error!r}") from None
    return result


def _warnings(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what else differs between the results: it can move a number as the policy does."""
    first = results[0]["settings"]
    for number, result in enumerate(results[1:], 2):
        other = result["settings"]
        keys = first.keys() | other.keys()
        for key in sorted(keys - set(OF_THE_POLICY)):
            if first.get(key) != other.get(key):
                yield f"WARNING: {key} is {first.get(key)} in 1, {other.get(key)} in {number}"
