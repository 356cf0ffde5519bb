"""The three places that a task's rows come from: upstream, local files, or a seed.

Upstream's files are pinned: each is checked against its git blob id.

A task whose objects in *.json have a form of their own, or whose rows have another source than
local files, has a module with `SOURCES`: its `Task.rows`. Other tasks have files of
objects {"question": ..., "answer": ...}: the user's message, and the ground truth.
"""

import argparse
import importlib
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, cast

import numpy as np

from verl_gdpo.atomic import replace_together
from verl_gdpo.tasks import TaskError, options_of
from verl_gdpo.tasks.preparation import DataError, UsageError, local_files
from verl_gdpo.tasks.preparation.local_files import Mend, RowOf
from verl_gdpo.tasks.preparation.packed_rows import PackedRows, PickedRows
from verl_gdpo.tasks.preparation.parquet import git_blob_id
from verl_gdpo.tasks.preparation.schema import Row, Splits
from verl_gdpo.tasks.task import Task

MakeRows = Callable[..., Iterable[Row]]  # make_rows(count, split="train" or "test", seed=...)
SYNTHETIC_ROWS = 2000
WEAK = "weak_sandbox"  # the option of scorers that run programs
MAX_BYTES = 64 << 20  # of a download
TIMEOUT_S = 30.0  # without a byte


@dataclass(frozen=True)
class Sources:
    """Where the rows of one task come from, and the command line's options for that.

    task: whose rows they are.
    row_of: makes a row from an object in *.json or *.jsonl. It raises LeftOut for an object that is
        of no use, and ValueError for a bad one: "field NAME: got ...; expected ...".
    of_parquet: the same for a row of *.parquet; by default, it is taken as it is.
    mend: makes a ground truth right, for all kinds of files; see `Mend`. It runs in several
        threads, and raises LeftOut for one that it cannot make right.
    make_rows: makes synthetic rows; none, there are none.
    base_url: of upstream; none, there is nothing to download.
    files: {split: (path below `base_url`, git blob id)}.
    dropped: keys of `extra_info` that are left out.
    flags: {option of `row_of` and `of_parquet` that is on if it is named: what it does}.
    """

    task: Task
    row_of: RowOf
    of_parquet: RowOf = lambda item, *_: item
    mend: Mend | None = None
    make_rows: MakeRows | None = None
    base_url: str = ""
    files: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    flags: Mapping[str, str] = field(default_factory=dict)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options that say where the rows come from; upstream, if any, needs none."""
        source = parser.add_mutually_exclusive_group()
        about = "local .json, .jsonl or .parquet; it is split unless --test is given"
        source.add_argument("--from", dest="source", metavar="FILE", type=Path, help=about)
        parser.add_argument("--test", metavar="FILE", type=Path, help="with --from: the test rows")
        if self.make_rows:
            self._add_synthetic(parser, source)
        if WEAK in options_of(self.task):
            about = "let the rows' solutions run in a weak sandbox, if no better one is here"
            parser.add_argument("--weak-sandbox", action="store_true", help=about)
        for name, about in self.flags.items():
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=about)
        if not self.base_url:
            return
        parser.add_argument("--base-url", metavar="URL", help=f"a mirror of {self.base_url}")
        about = "for downloads (default: ~/.cache/verl-gdpo)"
        parser.add_argument("--cache", metavar="DIR", type=Path, help=about)

    def _add_synthetic(
        self, parser: argparse.ArgumentParser, source: argparse._MutuallyExclusiveGroup
    ) -> None:
        about, positive = "make N training rows (default: %(const)s)", partial(whole_number, 1)
        source.add_argument(
            "--synthetic", metavar="N", type=positive, nargs="?", const=SYNTHETIC_ROWS, help=about
        )
        about = "test rows (default: N/10, at least 1)"
        parser.add_argument("--synthetic-test", metavar="M", type=positive, help=about)
        about = "of the synthetic rows (default: 0)"
        parser.add_argument("--seed", type=partial(whole_number, 0), help=about)

    def load(self, args: argparse.Namespace) -> Splits:
        """Return the checked rows of both files.

        Raises:
            UsageError: an option that does not belong to the source.
            DataError: the source cannot be had, or holds a row that is refused.
            OSError: a file cannot be read or, for a download, written.
        """
        given = vars(args)
        self._refuse_stray_options(given)
        if args.source is not None:
            chosen = self._in_weak_sandbox() if given.get(WEAK) else self
            flags = {name: True for name in self.flags if given[name]}
            row_of, of_parquet = chosen.row_of, partial(chosen.of_parquet, **flags)
            chosen = replace(chosen, row_of=partial(row_of, **flags), of_parquet=of_parquet)
            return chosen.from_files(args.source, args.test)
        if given.get("synthetic") is not None:
            return self._from_seed(given)
        if not self.base_url:
            ways = "--from FILE or --synthetic N" if self.make_rows else "--from FILE"
            raise UsageError(f"{self.task.name} has no rows to download; expected {ways}")
        cache = args.cache or Path.home() / ".cache" / "verl-gdpo"
        return self._from_upstream(args.base_url or self.base_url, cache)

    def from_files(self, source: Path, test: Path | None) -> Splits:
        """Return the rows of two files or, if `test` is None, of one that is split."""
        rows = local_files.read_rows(source, "train", self)
        if test is None:
            return local_files.split_rows(rows, str(source))
        return {"train": rows, "test": local_files.read_rows(test, "test", self)}

    def _in_weak_sandbox(self) -> "Sources":
        options = {WEAK: True}
        row_of, mend = partial(self.row_of, **options), self.mend and partial(self.mend, **options)
        task = replace(self.task, score=partial(self.task.score, **options))
        return replace(self, task=task, row_of=row_of, mend=mend)

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
            splits[split] = local_files.read_rows(local, split, self)
        return splits

    def _from_seed(self, given: Mapping[str, Any]) -> Splits:
        """Make rows; the same arguments give the same rows."""
        assert self.make_rows is not None
        train, seed = given["synthetic"], given["seed"] or 0
        counts = {"train": train, "test": given["synthetic_test"] or max(1, train // 10)}
        splits: Splits = {}
        for split, count in counts.items():
            said = f"making {count:,} synthetic {split} rows, seed {seed}"
            print(said, file=sys.stderr, flush=True)
            rows = PackedRows()
            for row in self.make_rows(count, split=split, seed=seed):
                rows.append(*local_files.numbered([row], split, self.dropped))
            splits[split] = PickedRows(rows, np.arange(len(rows)), split)
        return splits

    def _refuse_stray_options(self, given: Mapping[str, Any]) -> None:
        of_seed, of_files = given.get("synthetic") is not None, given["source"] is not None
        stray: list[str] = [] if of_files else ["test", *filter(given.get, self.flags)]
        stray += [] if of_seed else ["synthetic_test", "seed"]
        stray += ["base_url", "cache"] if of_seed or of_files else []
        for name in stray:
            if given.get(name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(f"{option} does not go with this source of rows; see --help")


def fetch(url: str, path: Path, *, blob_id: str) -> None:
    """Download `url` to `path`, unless `path` already has the right content.

    Args:
        path: only a complete download with the right id replaces it. Its folder is made.
        blob_id: the file's id, as printed by `git hash-object`.

    Raises:
        DataError: the download fails, is incomplete or too large, or has another id.
        OSError: `path` cannot be written.
    """
    if path.is_file() and git_blob_id(path.read_bytes()) == blob_id:
        print(f"using {path}: its git blob id is {blob_id[:12]}", file=sys.stderr)
        return
    print(f"downloading {url}", file=sys.stderr, flush=True)
    content = _downloaded(url)
    if (got := git_blob_id(content)) != blob_id:
        raise DataError(
            f"{url}: got git blob id {got} ({len(content):,} bytes); expected {blob_id}: it is "
            "another file, or the download damaged it"
        )
    with replace_together(path) as (temporary,):
        temporary.write_bytes(content)


def _downloaded(url: str) -> bytes:
    """The bytes at `url`; raises DataError if it cannot be read, or has too many."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            content: bytes = response.read(MAX_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DataError(f"{url}: download failed: {str(error) or repr(error)}") from error
    if len(content) > MAX_BYTES:
        raise DataError(f"{url}: download failed: got more than {MAX_BYTES:,} bytes")
    return content


def sources_of(task: Task) -> Sources:
    """Return the sources of a task's rows.

    Raises:
        TaskError: its module cannot be imported, or has none.
    """
    if not task.rows:
        return _questions_of(task)
    try:
        return cast(Sources, importlib.import_module(task.rows).SOURCES)
    except Exception as error:
        raise TaskError(
            f"the rows of the task {task.name!r} of {task.origin}: {task.rows}.SOURCES cannot be "
            f"imported: {type(error).__name__}: {error}"
        ) from error


def _questions_of(task: Task) -> Sources:

    def row_of(item: Any, *_: Any) -> Row:
        fields = local_files.strings_of(item, ("question", "answer"))
        return local_files.make_row(task, fields["question"], fields["answer"], task.system_prompt)

    return Sources(task=task, row_of=row_of)


def whole_number(low: int, text: str) -> int:
    """Return the number that an option's text is, for argparse."""
    if not (text.isdecimal() and int(text) >= low):
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number >= {low}")
    return int(text)
