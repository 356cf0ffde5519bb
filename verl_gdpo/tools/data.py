"""Prepares data: `verl-gdpo data TASK --out DIR`, or `python -m data_prep` in a checkout.

Writes DIR/train.parquet and DIR/test.parquet, and prints a report about their rows.

The exit code is 0 if both files are written, 1 if the data, the download or the disk fails (then no
file is written), and 2 for wrong usage.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from verl_gdpo.data_prep import DataError, UsageError, local_files, report
from verl_gdpo.data_prep.made_from import is_there, made_from
from verl_gdpo.data_prep.schema import write_parquets
from verl_gdpo.rewards import TASKS

# options that do not change the rows
OTHER_OPTIONS = ("task", "source_of", "out", "tokenizer", "if_needed", "base_url", "cache")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; raise SystemExit(2) for malformed arguments."""
    args = _parser().parse_args(argv)
    try:
        prepare(args)
    except BrokenPipeError:
        raise
    except (DataError, OSError) as error:
        print(f"data_prep: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("data_prep: error: interrupted", file=sys.stderr)
        return 1
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Load the task's rows, write both files, and print the report."""
    if args.out.exists() and not args.out.is_dir():
        raise DataError(f"--out {args.out}: got a file; expected a folder or nothing there")
    paths = [args.out / name for name in ("train.parquet", "test.parquet")]
    options = {k: v for k, v in vars(args).items() if k not in OTHER_OPTIONS}
    if args.if_needed and is_there(paths, made_from(args.task.name, options)):
        print(f"{' and '.join(map(str, paths))}: up to date")
        return
    # load the tokenizer first, so that a wrong path does not cost a download
    count_tokens = report.token_counter(args.tokenizer) if args.tokenizer else None
    splits = args.source_of.load(args, args.task)
    reports = {
        split: report.summarise(rows, args.task, count_tokens) for split, rows in splits.items()
    }
    shared_rows = report.overlap(splits)
    files = {args.out / f"{split}.parquet": rows for split, rows in splits.items()}
    write_parquets(files, made_from(args.task.name, options))
    print(report.table(reports, shared_rows))
    for path in files:
        print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    if shared_rows:
        print(
            f"data_prep: WARNING: {shared_rows} of {len(splits['test'])} test rows are also "
            "training rows; a score on them does not show generalisation",
            file=sys.stderr,
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="verl-gdpo data", description="Prepare a task's data for verl.")
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True)
    for name, task in TASKS.items():
        source = _source_of(name)
        summary = (source.__doc__ or "").split("\n")[0]
        task_parser = tasks.add_parser(name, help=summary, description=summary)
        task_parser.set_defaults(task=task, source_of=source)
        task_parser.add_argument(
            "--out", metavar="DIR", type=Path, required=True, help="folder for both files"
        )
        task_parser.add_argument(
            "--if-needed",
            action="store_true",
            help="write nothing if the same arguments and code have already written the files, and "
            "never replace a file that data_prep did not write",
        )
        task_parser.add_argument(
            "--tokenizer",
            metavar="DIR",
            type=Path,
            help="folder of a tokenizer; also report prompt lengths in its tokens",
        )
        source.add_arguments(task_parser)
    return parser


def _source_of(name: str) -> Any:
    """Return the module with `add_arguments(parser)` and `load(args, task) -> {split: rows}`."""
    own = f"{local_files.__package__}.{name}"
    return importlib.import_module(own) if importlib.util.find_spec(own) else local_files
