"""Coding problems: from local files in rllm's or verl's form, or synthetic.

A row of *.json or *.jsonl is {"problem": ..., "tests": ...}, with "solutions" or without. A parquet
file is in our schema, or in verl's: of a file like that of Eurus-2-RL, those rows are taken which
verl scores as code. `coding_tests.py` has the forms of the tests.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo.data_prep import DataError, LeftOut, UsageError, local_files
from verl_gdpo.data_prep.coding_synthetic import make_rows
from verl_gdpo.data_prep.coding_tests import problem_of
from verl_gdpo.data_prep.local_files import make_row, numbered, read_rows, split_rows
from verl_gdpo.data_prep.schema import Row, Splits, check_rows
from verl_gdpo.rewards.coding import TASK
from verl_gdpo.rewards.coding_problem import Problem
from verl_gdpo.rewards.task import Task

KEYS = ("problem", "tests")
VERLS_SOURCES = ("codecontests", "apps", "codeforces", "taco")  # `default_compute_score` has them
VERLS_COLUMNS = ["data_source", "prompt", "reward_model"]
SYNTHETIC_ROWS, OTHER_ROW = 2000, "rows of another task"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the rows come from; one of the sources has to be named."""
    local_files.add_arguments(parser, required=False)
    parser.add_argument(
        "--synthetic",
        metavar="N",
        type=int,
        nargs="?",
        const=SYNTHETIC_ROWS,
        help="make N training rows (default: %(const)s)",
    )
    parser.add_argument(
        "--synthetic-test", metavar="M", type=int, help="test rows (default: N/10, at least 1)"
    )
    parser.add_argument("--seed", type=int, help="of the synthetic rows (default: 0)")


def load(args: argparse.Namespace, _task: Task) -> Splits:
    """Return the checked rows of both files.

    Raises:
        UsageError: not exactly one source, or an option that does not belong to it.
        DataError: the source cannot be read, or holds a row that is refused.
        OSError: a file cannot be opened.
    """
    if (args.source is None) == (args.synthetic is None):
        raise UsageError("rows come from --from FILE or from --synthetic N: name one of them")
    if args.source is None and args.test is not None:
        raise UsageError("--test goes with --from FILE")
    if args.synthetic is None and (args.synthetic_test, args.seed) != (None, None):
        raise UsageError("--synthetic-test and --seed go with --synthetic N")
    if args.synthetic is not None:
        return _synthetic(args)
    rows = _rows_of(args.source, "train")
    if args.test is None:
        return split_rows(rows, str(args.source))
    return {"train": rows, "test": _rows_of(args.test, "test")}


def _synthetic(args: argparse.Namespace) -> Splits:
    test_rows = max(1, args.synthetic // 10) if args.synthetic_test is None else args.synthetic_test
    splits: Splits = {}
    for split, count in (("train", args.synthetic), ("test", test_rows)):
        if count < 1:
            raise UsageError(f"synthetic {split} rows: got {count}; expected at least 1")
        rows = make_rows(count, split=split, seed=args.seed or 0)
        splits[split] = numbered(rows, split)
        check_rows(splits[split], f"synthetic {split} rows")
    return splits


def _rows_of(path: Path, split: str) -> list[Row]:
    """A file's rows, checked and numbered; says on stderr what was left out of it."""
    left_out: Counter[str] = Counter()
    if path.suffix == ".parquet" and (table := _verls_table(path)) is not None:
        rows = numbered(list(_verls_rows(table, path, left_out)), split)
        check_rows(rows, str(path))
    else:
        rows = read_rows(path, split, TASK, lambda item, where: _row_of(item, where, left_out))
    reasons = "; ".join(f"{count:,} x {reason}" for reason, count in left_out.most_common())
    print(f"{path}: {len(rows):,} rows; left out: {reasons or 'nothing'}", file=sys.stderr)
    return rows


def _row_of(item: Any, where: str, left_out: Counter[str]) -> Row:
    if not isinstance(item, dict):
        raise DataError(f"{where}, the whole row: got {repr(item)[:80]}; expected an object")
    for key in (*KEYS, *item):
        if key not in item:
            raise DataError(f"{where}, field {key}: missing")
        if key not in (*KEYS, "solutions"):
            raise DataError(f"{where}, field {key}: unknown; expected {KEYS}, or 'solutions' too")
    solution = item.get("solutions")
    if isinstance(solution, list):
        solution = solution[0] if solution else None
    for key, text in (("problem", item["problem"]), ("solutions", solution)):
        if not (isinstance(text, str) or (text is None and key == "solutions")):
            raise DataError(f"{where}, field {key}: got {repr(text)[:80]}; expected a str")
    problem = _problem(item["tests"], f"{where}, field tests", left_out)
    if problem is None:
        raise LeftOut("no test that can be used")
    text = Problem(problem.function, problem.tests, solution).text()
    return make_row(TASK, item["problem"], text, TASK.system_prompt)


def _problem(tests: Any, where: str, left_out: Counter[str]) -> Problem | None:
    problem = problem_of(tests, where, left_out)
    if problem is None:
        left_out["rows without a test"] += 1
    return problem


def _verls_table(path: Path) -> pa.Table | None:
    """The file, if it has rows that verl scores as code."""
    try:
        with path.open("rb") as file:
            table = pq.ParquetFile(file).read(columns=VERLS_COLUMNS)
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{path}: got no readable parquet file ({error})") from error
    if {*VERLS_COLUMNS} > {*table.column_names}:
        return None
    is_code = any(source in VERLS_SOURCES for source in table["data_source"].unique().to_pylist())
    return table if is_code else None


def _verls_rows(table: pa.Table, path: Path, left_out: Counter[str]) -> Iterator[Row]:
    """Rows with the prompt that they have, and the ground truth in our form."""
    for number, source in enumerate(table["data_source"].to_pylist()):
        if source not in VERLS_SOURCES:
            left_out[OTHER_ROW] += 1
            continue
        (row,) = table.slice(number, 1).to_pylist()
        where = f"{path}, row {number}, field reward_model.ground_truth"
        try:
            tests = json.loads(row["reward_model"]["ground_truth"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DataError(f"{where}: got no JSON ({error!r})") from error
        problem = _problem(tests, where, left_out)
        if problem is not None:
            made = make_row(TASK, "", problem.text())
            yield {**made, "prompt": row["prompt"]}
