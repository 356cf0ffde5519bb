"""Prepares data: `verl-gdpo data TASK --out DIR`, or `python -m data_prep` in a checkout.

Writes DIR/train.parquet and DIR/test.parquet, and prints a report about their rows.

The exit code is 0 if both files are written, 1 if the data, the download or the disk fails (then no
file is written), and 2 for wrong usage.
"""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_gdpo.tasks import TASKS, TaskError
from verl_gdpo.tasks.preparation import DataError, UsageError
from verl_gdpo.tasks.preparation.loading import add_arguments, load
from verl_gdpo.tasks.preparation.prepared_files import (
    is_there,
    made_from,
    recorded_options,
    refuse_to_replace,
    write_parquets,
)
from verl_gdpo.tasks.preparation.schema import overlap, table
from verl_gdpo.tasks.preparation.sources import CALL_FORMAT, sources_of
from verl_gdpo.terminal import note

# Options that do not change the rows.
OTHER_OPTIONS = ("sources", "out", "if_needed", "keep_others", "force", "base_url", "cache")


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; raise SystemExit(2) for malformed arguments."""
    try:
        prepare(_parser().parse_args(argv))
    except BrokenPipeError:
        raise
    except (DataError, TaskError, OSError) as error:
        message = "\n  ".join(" ".join(line.split()) for line in str(error).splitlines())
        print(f"verl-gdpo data: {message}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    return 0


def prepare(args: argparse.Namespace) -> None:
    """Load the task's rows, write both files, and print the report."""
    if args.out.exists() and not args.out.is_dir():
        raise DataError(f"--out {args.out}: got a file; expected a folder or nothing there")
    task = args.sources.task
    paths = [args.out / name for name in ("train.parquet", "test.parquet")]
    options = {name: value for name, value in vars(args).items() if name not in OTHER_OPTIONS}
    if args.if_needed and is_there(paths, made_from(task, options)):
        print(f"{' and '.join(map(str, paths))}: up to date")
        return

    command_options = as_typed(options)
    made = recorded_options(paths)
    is_of_others = made is not None and made != command_options
    others_command = f"verl-gdpo data {task.name} {made}".strip()
    if is_of_others and args.keep_others:
        print(f"{args.out}: kept as `{others_command}` made it; delete it for other rows")
        return
    if not args.force:
        refuse_to_replace(paths)

    splits = load(args.sources, args)
    shared = overlap(splits)
    files = {args.out / f"{split}.parquet": rows for split, rows in splits.items()}
    write_parquets(files, made_from(task, options), command_options)

    if is_of_others:
        note(f"{args.out}: replaces what `{others_command}` made")
    print(table(splits, shared))
    for path in files:
        print(f"wrote {path} ({path.stat().st_size:,} bytes)")
    # Only tasks with call formats have the option.
    call_format = getattr(args, CALL_FORMAT, None)
    needed = args.sources.call_formats.get(call_format, "")
    if needed:
        print(f"a run on these rows needs {needed}")
    test_label = "row {} of test.parquet".format
    train_label = "row {} of train.parquet".format
    if shared.equal:
        note(f"WARNING: {shared.describe_equal(test_label, train_label)}")
    if shared.near:
        note(f"note: {shared.describe_near(test_label, train_label)}")


def as_typed(options: Mapping[str, Any]) -> str:
    """Return the options of a command that were given, as a user writes them in a shell."""
    typed = []
    for name, value in options.items():
        # The number 0 is left out too: it is the seed that is used without the option.
        if value in (None, False):
            continue
        option = "--" + name.replace("_", "-")
        if name == "source":
            option = "--from"
        if value is not True:
            option = f"{option} {shlex.quote(str(value))}"
        typed.append(option)
    return " ".join(typed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo data", description="Prepare a task's data for verl."
    )
    tasks = parser.add_subparsers(title="tasks", metavar="TASK", required=True)
    for name, task in TASKS.items():
        sources = sources_of(task)
        where = "Rows from local files."
        if task.rows:
            where = sys.modules[task.rows].__doc__ or ""
        summary = where.split("\n")[0]
        task_parser = tasks.add_parser(name, help=summary, description=summary)
        task_parser.set_defaults(sources=sources)
        add = task_parser.add_argument
        add("--out", metavar="DIR", type=Path, required=True, help="folder for both files")
        about = "write nothing if the same arguments and code have already written the files"
        add("--if-needed", help=about, action="store_true")
        about = "write nothing if other options of this command have written the files"
        add("--keep-others", help=about, action="store_true")
        about = (
            "replace files that this command did not write, or that were changed, and those that "
            "links lead to"
        )
        add("--force", help=about, action="store_true")
        add_arguments(task_parser, sources)
    return parser
