"""`python -m data_prep TASK --out DIR`: DIR/train.parquet and DIR/test.parquet, and a report.

Exit code 0: both files are written; 1: data, download or disk, and neither is; 2: usage.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from data_prep import DataError, UsageError, report, tool_rl
from data_prep.schema import write_parquets

# a task is a module with `add_arguments(parser)` and `load(args)`, which returns checked rows
TASKS = {"tool_rl": tool_rl}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return the exit code, or raise SystemExit(2) for a malformed one."""
    args = _parser().parse_args(argv)
    try:
        prepare(args)
    except (DataError, OSError) as error:
        print(f"data_prep: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("data_prep: error: interrupted", file=sys.stderr)
        return 1
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Load the task's rows, write both files, and print what is in them."""
    if args.out.exists() and not args.out.is_dir():
        raise DataError(f"--out {args.out}: got a file; expected a folder or nothing there")
    # early: a wrong tokenizer path should not cost a download
    count_tokens = report.token_counter(args.tokenizer) if args.tokenizer else None
    splits = args.task.load(args)
    reports = {split: report.summarise(rows, count_tokens) for split, rows in splits.items()}
    shared_rows = report.overlap(splits)
    files = {args.out / f"{split}.parquet": rows for split, rows in splits.items()}
    write_parquets(files)
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
    parser = _Parser(prog="python -m data_prep", description="Prepare a task's data for verl.")
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True)
    for name, task in TASKS.items():
        summary = (task.__doc__ or "").split("\n")[0]
        task_parser = tasks.add_parser(name, help=summary, description=summary)
        task_parser.set_defaults(task=task)
        task_parser.add_argument(
            "--out", metavar="DIR", type=Path, required=True, help="gets train and test.parquet"
        )
        task_parser.add_argument(
            "--tokenizer",
            metavar="DIR",
            type=Path,
            help="also report prompt lengths in tokens of the tokenizer saved there",
        )
        task.add_arguments(task_parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
