"""Tool calling (ToolRL's rlla_4k): from upstream, from local files, or synthetic.

Upstream is github.com/qiancheng0/ToolRL (Apache-2.0) at one commit; each file is checked against
its git blob id there.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data_prep import DataError, UsageError
from data_prep.download import fetch, git_blob_id
from data_prep.schema import Row, Splits, check_rows, read_parquet

DATA_SOURCE = "rlla"
COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
BASE_URL = f"https://raw.githubusercontent.com/qiancheng0/ToolRL/{COMMIT}"
UPSTREAM = {  # split -> path below the base URL, git blob id
    "train": ("dataset/rlla_4k/train.parquet", "0ddc730c556e4d26449dbdb55a1b28be824a8bfe"),
    "test": ("dataset/rlla_4k/test.parquet", "ccdac1cc0112fb54dd68cbc88d9abfe28ce3d749"),
}
JSON_BLOB_ID = "1827b67d516cca98f58541c8d218a038d13321e3"  # dataset/rlla_4k_raw/rlla_rl.json
SPLIT_SEED, TEST_SHARE = 31415, 0.02
SYNTHETIC_ROWS = 2000
JSON_KEYS = ("instruction", "input", "output")
# in upstream's and in synthetic `extra_info`: prompt and ground truth once more; left out
REPEATED = (*JSON_KEYS, "kind", "calls")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where the rows come from; without any, from upstream."""
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
    parser.add_argument("--seed", type=_natural, help="of the synthetic rows (default: 0)")
    parser.add_argument(
        "--size", choices=("tiny", "full"), help="of synthetic prompts (default: full)"
    )
    parser.add_argument("--base-url", metavar="URL", help=f"a mirror of {BASE_URL}")
    parser.add_argument(
        "--cache", metavar="DIR", type=Path, help="for downloads (default: ~/.cache/verl-gdpo)"
    )


def load(args: argparse.Namespace) -> Splits:
    """Return the checked rows of both files.

    Raises:
        UsageError: an option that does not belong to the source.
        DataError: the source cannot be had, or holds a row that is refused.
        OSError: a file cannot be read or, for a download, written.
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
    """Download the official files into `cache`, unless they are there, and return their rows."""
    splits: Splits = {}
    for split, (path, blob_id) in UPSTREAM.items():
        local = cache / "tool_rl" / Path(path).name
        try:
            fetch(f"{base_url.rstrip('/')}/{path}", local, blob_id=blob_id)
        except DataError as error:
            raise DataError(f"{error}. Without a download: --from FILE or --synthetic N") from error
        splits[split] = read_rows(local, split)
    return splits


def from_files(source: Path, test: Path | None) -> Splits:
    """Return the rows of two files or, if `test` is None, of one that is split."""
    known = {blob_id for _, blob_id in UPSTREAM.values()} | {JSON_BLOB_ID}
    for path in (source, test) if test else (source,):
        blob_id = git_blob_id(path)
        origin = "a file" if blob_id in known else "not a file"
        print(f"reading {path}: {origin} of the pinned upstream ({blob_id[:12]})", file=sys.stderr)
    rows = read_rows(source, "train")
    if test is None:
        return split_rows(rows, str(source))
    return {"train": rows, "test": read_rows(test, "test")}


def from_synthetic(
    train_rows: int, test_rows: int, seed: int, size: Literal["tiny", "full"]
) -> Splits:
    """Make rows; the same arguments give the same rows."""
    from data_prep.synthetic import make_rows

    splits: Splits = {}
    counts: dict[Literal["train", "test"], int] = {"train": train_rows, "test": test_rows}
    for split, count in counts.items():
        print(f"making {count:,} synthetic {split} rows, seed {seed}", file=sys.stderr, flush=True)
        splits[split] = _numbered(make_rows(count, split=split, seed=seed, size=size), split)
        check_rows(splits[split], f"synthetic {split} rows")
    return splits


def read_rows(path: Path, split: str) -> list[Row]:
    """Return a file's rows, checked and numbered.

    Args:
        path: *.json, a list of {instruction, input, output}, or *.parquet in verl's schema.
            Index and split in `extra_info` are set anew.
        split: "train" or "test", for `extra_info`.

    Raises:
        DataError: names the file and, for a bad row, the row (from 0) and its field.
        OSError: it cannot be read.
    """
    if path.suffix == ".json":
        rows = _read_json(path)
    elif path.suffix == ".parquet":
        rows = read_parquet(path)
    else:
        raise DataError(f"{path}: got suffix {path.suffix!r}; expected '.json' or '.parquet'")
    rows = _numbered(rows, split)
    check_rows(rows, str(path))
    for number, row in enumerate(rows):
        if row["data_source"] != DATA_SOURCE:
            raise DataError(
                f"{path}, row {number}, field data_source: got {row['data_source']!r}; "
                f"expected {DATA_SOURCE!r}"
            )
    return rows


def split_rows(rows: Sequence[Row], where: str) -> Splits:
    """Split as upstream did: shuffled by numpy's legacy generator, the last 2 % are the test rows.

    Raises:
        DataError: too few rows to hold out one; `where` is what the message calls them.
    """
    test_count = int(TEST_SHARE * len(rows))
    if test_count == 0:
        raise DataError(
            f"{where}: got {len(rows)} rows, of which int({TEST_SHARE} * {len(rows)}) = 0 would be "
            "test rows; expected at least 50, or the test rows in a file of their own: --test FILE"
        )
    order = np.arange(len(rows))
    np.random.RandomState(SPLIT_SEED).shuffle(order)
    shuffled = [rows[i] for i in order.tolist()]
    return {
        "train": _numbered(shuffled[:-test_count], "train"),
        "test": _numbered(shuffled[-test_count:], "test"),
    }


def _read_json(path: Path) -> list[Row]:
    try:
        items = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: got no readable JSON ({error})") from error
    if not isinstance(items, list):
        raise DataError(f"{path}: got a JSON {type(items).__name__}; expected a list of objects")
    return [_row_of_item(item, f"{path}, row {number}") for number, item in enumerate(items)]


def _row_of_item(item: Any, where: str) -> Row:
    if not isinstance(item, dict):
        raise DataError(f"{where}, the whole row: got {repr(item)[:80]}; expected an object")
    for key in (*JSON_KEYS, *item):
        if key not in JSON_KEYS:
            # not passed over: a "history", say, would be part of the prompt
            raise DataError(f"{where}, field {key}: unknown; expected only {JSON_KEYS}")
        if not isinstance(item.get(key), str):
            got = repr(item[key])[:80] if key in item else "nothing"
            raise DataError(f"{where}, field {key}: got {got}; expected a str")
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": item["instruction"]},
            {"role": "user", "content": item["input"]},
        ],
        "ability": "math",  # upstream's parquet files say so; kept, to give the same rows
        "reward_model": {"style": "rule", "ground_truth": item["output"]},
        "extra_info": {},
    }


def _numbered(rows: Sequence[Row], split: str) -> list[Row]:
    return [_placed(row, index, split) for index, row in enumerate(rows)]


def _placed(row: Row, index: int, split: str) -> Row:
    extra = row.get("extra_info") or {}
    if not isinstance(extra, dict):
        return row  # for check_rows to refuse
    kept = {key: value for key, value in extra.items() if key not in REPEATED}
    return {**row, "extra_info": {**kept, "index": index, "split": split}}


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
