"""The three places that a task's rows come from: upstream, local files, or a seed.

Upstream's files are pinned: each is checked against its git blob id.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from verl_gdpo.data_prep import DataError, UsageError
from verl_gdpo.data_prep.download import fetch, git_blob_id
from verl_gdpo.data_prep.local_files import RowOf, load_files, numbered, read_rows
from verl_gdpo.data_prep.schema import Row, Splits, check_rows
from verl_gdpo.rewards.task import Task

MakeRows = Callable[..., list[Row]]  # make_rows(count, split="train" or "test", seed=...)
SYNTHETIC_ROWS = 2000


@dataclass(frozen=True)
class Sources:
    """Where the rows of one task come from, and the command line's options for that.

    task: whose rows they are.
    row_of: makes a row of an object in *.json or *.jsonl; see `local_files.read_rows`.
    base_url: of upstream; none, there is nothing to download.
    files: {split: (path below `base_url`, git blob id)}.
    other_blob_ids: of upstream's files that hold the same rows in another form.
    dropped: keys of `extra_info` that are left out.
    """

    task: Task
    row_of: RowOf
    base_url: str = ""
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    other_blob_ids: Sequence[str] = ()
    dropped: Sequence[str] = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that say where the rows come from; upstream, if any, needs none."""
        source = parser.add_mutually_exclusive_group(required=not self.base_url)
        source.add_argument(
            "--from",
            dest="source",
            metavar="FILE",
            type=Path,
            help="local .json, .jsonl or .parquet; it is split unless --test is given",
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
        if not self.base_url:
            return
        parser.add_argument("--base-url", metavar="URL", help=f"a mirror of {self.base_url}")
        parser.add_argument(
            "--cache",
            metavar="DIR",
            type=Path,
            help="for downloads (default: ~/.cache/verl-gdpo)",
        )

    def load(self, args: argparse.Namespace, make_rows: MakeRows) -> Splits:
        """Return the checked rows of both files.

        Raises:
            UsageError: an option that does not belong to the source.
            DataError: the source cannot be had, or holds a row that is refused.
            OSError: a file cannot be read or, for a download, written.
        """
        _refuse_stray_options(args)
        if args.source is not None:
            return self.from_files(args.source, args.test)
        if args.synthetic is not None:
            test_rows = args.synthetic_test or max(1, args.synthetic // 10)
            counts = {"train": args.synthetic, "test": test_rows}
            return self._from_seed(make_rows, counts, args.seed or 0)
        cache = args.cache or Path.home() / ".cache" / "verl-gdpo"
        return self._from_upstream(args.base_url or self.base_url, cache)

    def from_files(self, source: Path, test: Path | None) -> Splits:
        """Return the rows of two files or, if `test` is None, of one that is split."""
        known = {*self.other_blob_ids, *(blob_id for _, blob_id in self.files.values())}
        for path in filter(None, (source, test)) if self.files else ():
            blob_id = git_blob_id(path)
            origin = "a file" if blob_id in known else "not a file"
            print(
                f"reading {path}: {origin} of the pinned upstream ({blob_id[:12]})",
                file=sys.stderr,
            )
        return load_files(source, test, self.task, self.row_of, self.dropped)

    def _from_upstream(self, base_url: str, cache: Path) -> Splits:
        """Download the official files into `cache`, unless they are there."""
        splits: Splits = {}
        for split, (path, blob_id) in self.files.items():
            local = cache / self.task.name / Path(path).name
            try:
                fetch(f"{base_url.rstrip('/')}/{path}", local, blob_id=blob_id)
            except DataError as error:
                hint = "Without a download: --from FILE or --synthetic N"
                raise DataError(f"{error}. {hint}") from error
            splits[split] = read_rows(local, split, self.task, self.row_of, self.dropped)
        return splits

    def _from_seed(self, make_rows: MakeRows, counts: Mapping[str, int], seed: int) -> Splits:
        """Make rows; the same arguments give the same rows."""
        splits: Splits = {}
        for split, count in counts.items():
            print(
                f"making {count:,} synthetic {split} rows, seed {seed}", file=sys.stderr, flush=True
            )
            rows = make_rows(count, split=split, seed=seed)
            splits[split] = numbered(rows, split, self.dropped)
            check_rows(splits[split], f"synthetic {split} rows")
        return splits


def _refuse_stray_options(args: argparse.Namespace) -> None:
    is_upstream = args.source is None and args.synthetic is None
    for option, is_there, belongs in (
        ("--test", args.test, args.source is not None),
        ("--synthetic-test", args.synthetic_test, args.synthetic is not None),
        ("--seed", args.seed, args.synthetic is not None),
        ("--base-url", getattr(args, "base_url", None), is_upstream),
        ("--cache", getattr(args, "cache", None), is_upstream),
    ):
        if is_there is not None and not belongs:
            raise stray_option(option)


def stray_option(option: str) -> UsageError:
    """For an option that says something about another source of rows."""
    return UsageError(f"{option} does not go with this source of rows; see --help")


def _positive(text: str) -> int:
    return _whole_number(text, 1)


def _natural(text: str) -> int:
    return _whole_number(text, 0)


def _whole_number(text: str, low: int) -> int:
    if not (text.isdecimal() and int(text) >= low):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number >= {low}")
    return int(text)
