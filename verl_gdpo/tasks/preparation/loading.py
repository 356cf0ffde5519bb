"""Loads a task's rows from one of three places: upstream, local files, or a seed.

Upstream's files are pinned: each is checked against its git blob id.
"""

import argparse
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.atomic import replace_together
from verl_gdpo.tasks import options_of
from verl_gdpo.tasks.preparation import DataError, UsageError, local_files
from verl_gdpo.tasks.preparation.prepared_files import git_blob_id
from verl_gdpo.tasks.preparation.schema import Row, Splits
from verl_gdpo.tasks.preparation.sources import CALL_FORMAT, WEAK, Sources
from verl_gdpo.terminal import note

SYNTHETIC_ROWS = 2000
MAX_BYTES = 64 << 20  # The most bytes of a download.
TIMEOUT_S = 30.0  # The longest wait for its next byte.


def add_arguments(parser: argparse.ArgumentParser, sources: Sources) -> None:
    """Add the options that say where the rows come from; upstream, if any, needs none."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        type=Path,
        help="local .json, .jsonl or .parquet; it is split unless --test is given",
    )
    parser.add_argument("--test", metavar="FILE", type=Path, help="with --from: the test rows")
    if sources.make_rows:
        source.add_argument(
            "--synthetic",
            metavar="N",
            type=partial(whole_number, 1),
            nargs="?",
            const=SYNTHETIC_ROWS,
            help="make N training rows (default: %(const)s)",
        )
        parser.add_argument(
            "--synthetic-test",
            metavar="M",
            type=partial(whole_number, 1),
            help="test rows (default: N/10, at least 1)",
        )
        parser.add_argument(
            "--seed",
            type=partial(whole_number, 0),
            help="of the synthetic rows (default: 0)",
        )
    if WEAK in options_of(sources.task):
        parser.add_argument(
            _option(WEAK),
            action="store_true",
            help="let the rows' solutions run in a weak sandbox, if no better one is here",
        )
    if sources.call_formats:
        first = next(iter(sources.call_formats))
        parser.add_argument(
            _option(CALL_FORMAT),
            choices=sources.call_formats,
            help="how a call of a tool is written, which the system messages teach "
            f"(default: {first})",
        )
    if sources.base_url:
        parser.add_argument("--base-url", metavar="URL", help=f"a mirror of {sources.base_url}")
        parser.add_argument(
            "--cache",
            metavar="DIR",
            type=Path,
            help="for downloads (default: ~/.cache/verl-gdpo)",
        )


def _option(name: str) -> str:
    """Return how the command line writes a name, such as "--seed"."""
    return f"--{name.replace('_', '-')}"


def whole_number(low: int, text: str) -> int:
    """Return the number that an option's text is, for argparse."""
    if not text.isdecimal() or int(text) < low:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number >= {low}")
    return int(text)


def load(sources: Sources, args: argparse.Namespace) -> Splits:
    """Return the checked rows of both files.

    Raises:
        UsageError: an option that does not belong to the source.
        DataError: the source cannot be had, or holds a row that is refused.
        OSError: a file cannot be read or, for a download, written.
    """
    arguments = dict(vars(args))
    if sources.made_rows and args.source is None:
        arguments["synthetic"] = args.synthetic or sources.made_rows
    _refuse_stray_options(arguments)
    _require_scorer(sources)
    if arguments.get(CALL_FORMAT) is not None:
        sources = teaching(sources, arguments[CALL_FORMAT])
    if args.source is not None:
        return _from_files(with_options(sources, arguments), args.source, args.test)
    if arguments.get("synthetic") is not None:
        return _from_seed(sources, arguments)
    if not sources.base_url:
        ways = "--from FILE or --synthetic N" if sources.make_rows else "--from FILE"
        raise UsageError(f"{sources.task.name} has no rows to download; expected {ways}")
    return _from_upstream(sources, args.base_url or sources.base_url, args.cache)


def _refuse_stray_options(arguments: Mapping[str, Any]) -> None:
    of_files = arguments["source"] is not None
    of_seed = arguments.get("synthetic") is not None
    stray = []
    if not of_files:
        stray.append("test")
    if not of_seed:
        stray.extend(["synthetic_test", "seed"])
    if of_files or of_seed:
        stray.extend(["base_url", "cache"])
    for name in stray:
        if arguments.get(name) is not None:
            raise UsageError(f"{_option(name)} does not go with this source of rows; see --help")


def _require_scorer(sources: Sources) -> None:
    """Raise DataError if this machine cannot score the task, before each row is blamed for it.

    A task that runs programs says so itself, at the first row with a program.
    """
    if sources.task.programs is not None:
        return
    try:
        sources.task.missing()
    except OSError as error:
        raise DataError(str(error)) from error


def with_options(sources: Sources, arguments: Mapping[str, Any]) -> Sources:
    """Return the sources whose functions have the options that are on.

    Args:
        arguments: `WEAK`, if solutions may run in a weak sandbox; all others are not looked at.
    """
    options = {}
    if arguments.get(WEAK):
        options[WEAK] = True
    mend = sources.mend
    if mend is not None:
        mend = partial(mend, **options)
    return replace(
        sources,
        task=replace(sources.task, score=partial(sources.task.score, **options)),
        row_of=partial(sources.row_of, **options),
        mend=mend,
    )


def teaching(sources: Sources, call_format: str) -> Sources:
    """Return the sources whose rows, of all kinds, teach a format of calls of tools."""
    in_call_format = sources.in_call_format
    assert in_call_format is not None

    def row_of(item: Any, note: Callable[[str], None]) -> Row:
        return in_call_format(sources.row_of(item, note), call_format)

    def of_verl(item: Any, note: Callable[[str], None]) -> Row:
        return in_call_format(sources.of_verl(item, note), call_format)

    def make_rows(count: int, **options: Any) -> Iterator[Row]:
        assert sources.make_rows is not None
        for row in sources.make_rows(count, **options):
            yield in_call_format(row, call_format)

    teaching = replace(sources, row_of=row_of, of_verl=of_verl)
    if sources.make_rows is None:
        return teaching
    return replace(teaching, make_rows=make_rows)


def _from_files(sources: Sources, source: Path, test: Path | None) -> Splits:
    """The rows of two files or, if `test` is None, of one that is split."""
    rows = local_files.read_rows(source, "train", sources)
    if test is None:
        return local_files.split_rows(rows, str(source))
    return {"train": rows, "test": local_files.read_rows(test, "test", sources)}


def _from_seed(sources: Sources, arguments: Mapping[str, Any]) -> Splits:
    """Make rows; the same arguments give the same rows."""
    assert sources.make_rows is not None
    seed = arguments["seed"] or 0
    train_count = arguments["synthetic"]
    test_count = arguments["synthetic_test"] or max(1, train_count // 10)
    splits: Splits = {}
    for split, count in (("train", train_count), ("test", test_count)):
        note(f"making {count:,} synthetic {split} rows, seed {seed}")
        rows = local_files.PackedRows()
        for row in sources.make_rows(count, split=split, seed=seed):
            rows.append(local_files.placed(row, 0, split, sources.dropped))
        splits[split] = local_files.PickedRows(rows, np.arange(len(rows)), split)
    return splits


def _from_upstream(sources: Sources, base_url: str, cache: Path | None) -> Splits:
    """Download the official files into `cache`, unless they are there."""
    cache = cache or Path.home() / ".cache" / "verl-gdpo"
    splits: Splits = {}
    for split, (path, blob_id) in sources.files.items():
        local = cache / sources.task.name / Path(path).name
        try:
            fetch(f"{base_url.rstrip('/')}/{path}", local, blob_id=blob_id)
        except DataError as error:
            hint = "Without a download: --from FILE or --synthetic N"
            raise DataError(f"{error}. {hint}") from error
        splits[split] = local_files.read_rows(local, split, sources)
    return splits


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
        note(f"using {path}: its git blob id is {blob_id[:12]}")
        return
    note(f"downloading {url}")
    content = _downloaded(url)
    got = git_blob_id(content)
    if got != blob_id:
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
