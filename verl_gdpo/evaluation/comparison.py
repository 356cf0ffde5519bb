"""Puts several results of one benchmark side by side, with intervals that are paired by problem."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_gdpo.evaluation.numbers import QuestionScores, numbers
from verl_gdpo.evaluation.results import column_of, flat, read_result, shown
from verl_gdpo.terminal import printable, render

# settings that have to differ, or may without a word
OF_THE_POLICY = ("model", "step")


def compare(paths: Sequence[Path]) -> str:
    """Return a table: each result, and its difference from the first one.

    Raises:
        ValueError: a file is no result, or the results are of other questions.
    """
    results = [read_result(path) for path in paths]
    first = results[0]
    for path, result in zip(paths, results, strict=True):
        _check_same(first, result, paths[0], path)
    percent = first["percent"]
    columns = [column_of(one) for one in first["columns"]]
    keys = [*first["problems"]]
    problems = [[QuestionScores(**one["problems"][key]) for key in keys] for one in results]
    values = [[*flat([*map(asdict, numbers(columns, one))])] for one in problems]
    changes = [
        [*flat([*map(asdict, numbers(columns, one, less=problems[0]))])] for one in problems[1:]
    ]
    header = ["%" if percent else "", "1"]
    for number in range(2, len(results) + 1):
        header += [str(number), f"{number} less 1", "95 % interval"]
    rows = []
    for k, (name, base) in enumerate(values[0]):
        row = [name, shown(base, percent)[0]]
        for of_one, changed in zip(values[1:], changes, strict=True):
            row += [shown(of_one[k][1], percent)[0], *shown(changed[k][1], percent)]
        rows.append(row)
    names = [
        f"{k}  {_name(path, one)}"
        for k, (path, one) in enumerate(zip(paths, results, strict=True), 1)
    ]
    return "\n".join([*names, "", render(header, rows), "", *_warnings(results)])


def _check_same(
    first: Mapping[str, Any], other: Mapping[str, Any], where: Path, path: Path
) -> None:
    is_same = first["settings"]["questions"] == other["settings"]["questions"]
    if first["bench"] != other["bench"] or not is_same:
        raise ValueError(
            f"{path}: {other['bench']} with other questions than {first['bench']} in {where}; "
            "results are compared on the same ones"
        )


def _warnings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What else differs between the results, because it can move a number as the policy does."""
    first = results[0]["settings"]
    warnings = []
    for number, result in enumerate(results[1:], 2):
        other = result["settings"]
        for key in sorted(k for k in {**first, **other} if first.get(k) != other.get(k)):
            if key not in OF_THE_POLICY:
                warnings.append(
                    f"WARNING: {key} is {first.get(key)} in 1, {other.get(key)} in {number}"
                )
    return warnings


def _name(path: Path, result: Mapping[str, Any]) -> str:
    place = result.get("policy", {}).get("place", "")
    return printable(f"{path}: {place}, step {result['settings'].get('step')}")
