"""Downloads a file and checks its git blob id."""

import hashlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from verl_gdpo.atomic import replace_together
from verl_gdpo.data_prep import DataError, Progress

CHUNK_BYTES = 1 << 16
MAX_BYTES = 64 << 20
TIMEOUT_S = 30.0  # without a byte


def git_blob_id(path: Path) -> str:
    """Return the id that `git hash-object PATH` prints."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(url: str, path: Path, *, blob_id: str) -> None:
    """Download `url` to `path`, unless `path` already has the right content.

    Args:
        path: only a complete download with the right id replaces it. Its folder is made.
        blob_id: the file's id, as printed by `git hash-object`.

    Raises:
        DataError: the download fails, is incomplete or too large, or has another id.
        OSError: `path` cannot be written.
    """
    if path.is_file() and git_blob_id(path) == blob_id:
        print(f"using {path}: its git blob id is {blob_id[:12]}", file=sys.stderr)
        return
    print(f"downloading {url}", file=sys.stderr, flush=True)
    with replace_together(path) as (temporary,):
        with temporary.open("xb") as file:
            for chunk in _chunks(url):
                file.write(chunk)
        got = git_blob_id(temporary)
        if got != blob_id:
            raise DataError(
                f"{url}: got git blob id {got} ({temporary.stat().st_size:,} bytes); expected "
                f"{blob_id}: it is another file, or the download damaged it"
            )


def _chunks(url: str) -> Iterator[bytes]:
    """Yield the bytes at `url`; raise DataError if it cannot be read, or has too many."""
    progress = Progress(f"downloading {url}", None, "bytes")
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            while chunk := response.read(CHUNK_BYTES):
                received += len(chunk)
                if received > MAX_BYTES:
                    raise ValueError(f"got more than {MAX_BYTES:,} bytes")
                progress.at(received)
                yield chunk
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        said = str(error) or repr(error)
        raise DataError(f"{url}: download failed after {received:,} bytes: {said}") from error
