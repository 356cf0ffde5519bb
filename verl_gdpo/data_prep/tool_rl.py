"""Tool calling (ToolRL's rlla_4k): from upstream, from local files, or synthetic.

Upstream is github.com/qiancheng0/ToolRL (Apache-2.0) at a fixed commit. The git blob id of each
file is checked.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Literal

from verl_gdpo.data_prep import DataError, UsageError
from verl_gdpo.data_prep.download import fetch, git_blob_id
from verl_gdpo.data_prep.local_files import load_files, make_row, numbered, read_rows, strings_of
from verl_gdpo.data_prep.schema import Row, Splits, check_rows
from verl_gdpo.rewards.task import Task
from verl_gdpo.rewards.tool_rl import TASK

COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
BASE_URL = f"https://raw.githubusercontent.com/qiancheng0/ToolRL/{COMMIT}"
UPSTREAM = {  # split -> path below the base URL, git blob id
    "train": ("dataset/rlla_4k/train.parquet", "0ddc730c556e4d26449dbdb55a1b28be824a8bfe"),
    "test": ("dataset/rlla_4k/test.parquet", "ccdac1cc0112fb54dd68cbc88d9abfe28ce3d749"),
}
JSON_BLOB_ID = "1827b67d516cca98f58541c8d218a038d13321e3"  # dataset/rlla_4k_raw/rlla_rl.json
SYNTHETIC_ROWS = 2000
JSON_KEYS = ("instruction", "input", "output")
# keys of `extra_info` that repeat the prompt and the ground truth, so they are left out
REPEATED = (*JSON_KEYS, "kind", "calls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the source of the rows. The default source is upstream."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        type=Path,
        help="local rlla_rl.json or parquet; split into train and test unless --test is given",
    )
    source.add_argument(
        "--synthetic",
        metavar="N",
        type=_positive,
        nargs="?",
        const=SYNTHETIC_ROWS,
        help="make N training rows (default: %(const)s)",
    )
    parser.add_argument("--test", metavar="FILE", type=Path, help="with --from: the test rows")
    parser.add_argument(
        "--synthetic-test",
        metavar="M",
        type=_positive,
        help="test rows (default: N/10, at least 1)",
    )
    parser.add_argument("--seed", type=_natural, help="seed of the synthetic rows (default: 0)")
    parser.add_argument(
        "--size", choices=("tiny", "full"), help="size of synthetic prompts (default: full)"
    )
    parser.add_argument("--base-url", metavar="URL", help=f"a mirror of {BASE_URL}")
    parser.add_argument(
        "--cache", metavar="DIR", type=Path, help="download folder (default: ~/.cache/verl-gdpo)"
    )


def load(args: argparse.Namespace, _task: Task) -> Splits:
    """Return the checked rows of both files.

    Raises:
        UsageError: an option does not belong to the source.
        DataError: the source cannot be downloaded or read, or a row is refused.
        OSError: a file cannot be opened or, for a download, written.
    """
    _refuse_stray_options(args)
    if args.source is not None:
        return from_files(args.source, args.test)
    if args.synthetic is not None:
        test_rows = args.synthetic_test or max(1, args.synthetic // 10)
        return from_synthetic(args.synthetic, test_rows, args.seed or 0, args.size or "full")
    cache = args.cache or Path.home() / ".cache" / "verl-gdpo"
    return from_upstream(args.base_url or BASE_URL, cache)


def from_upstream(base_url: str, cache: Path) -> Splits:
    """Return the rows of the official files, which are downloaded into `cache` if needed."""
    splits: Splits = {}
    for split, (path, blob_id) in UPSTREAM.items():
        local = cache / "tool_rl" / Path(path).name
        try:
            fetch(f"{base_url.rstrip('/')}/{path}", local, blob_id=blob_id)
        except DataError as error:
            raise DataError(f"{error}. Without a download: --from FILE or --synthetic N") from error
        splits[split] = read_rows(local, split, TASK, _row_of_item, REPEATED)
    return splits


def from_files(source: Path, test: Path | None) -> Splits:
    """Return the rows of two files, or split the rows of one file if `test` is None."""
    known = {blob_id for _, blob_id in UPSTREAM.values()} | {JSON_BLOB_ID}
    for path in (source, test) if test else (source,):
        blob_id = git_blob_id(path)
        origin = "a file" if blob_id in known else "not a file"
        print(f"reading {path}: {origin} of the pinned upstream ({blob_id[:12]})", file=sys.stderr)
    return load_files(source, test, TASK, _row_of_item, REPEATED)


def from_synthetic(
    train_rows: int, test_rows: int, seed: int, size: Literal["tiny", "full"]
) -> Splits:
    """Make rows; the same arguments give the same rows."""
    from verl_gdpo.data_prep.tool_rl_synthetic import make_rows

    splits: Splits = {}
    counts: dict[Literal["train", "test"], int] = {"train": train_rows, "test": test_rows}
    for split, count in counts.items():
        print(f"making {count:,} synthetic {split} rows, seed {seed}", file=sys.stderr, flush=True)
        rows = make_rows(count, split=split, seed=seed, size=size)
        splits[split] = numbered(rows, split, REPEATED)
        check_rows(splits[split], f"synthetic {split} rows")
    return splits


def _row_of_item(item: Any, where: str) -> Row:
    fields = strings_of(item, JSON_KEYS, where)
    # upstream's parquet files have the ability "math", and our rows must be the same
    return make_row(TASK, fields["input"], fields["output"], fields["instruction"], ability="math")


def _refuse_stray_options(args: argparse.Namespace) -> None:
    is_upstream = args.source is None and args.synthetic is None
    for option, value, belongs in (
        ("--test", args.test, args.source is not None),
        ("--synthetic-test", args.synthetic_test, args.synthetic is not None),
        ("--seed", args.seed, args.synthetic is not None),
        ("--size", args.size, args.synthetic is not None),
        ("--base-url", args.base_url, is_upstream),
        ("--cache", args.cache, is_upstream),
    ):
        if value is not None and not belongs:
            raise UsageError(f"{option} does not go with this source of rows; see --help")


def _positive(text: str) -> int:
    return _whole_number(text, 1)


def _natural(text: str) -> int:
    return _whole_number(text, 0)


def _whole_number(text: str, low: int) -> int:
    if not (text.isdecimal() and int(text) >= low):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number >= {low}")
    return int(text)
