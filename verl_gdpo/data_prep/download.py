"""Downloads a file and checks its git blob id."""

import hashlib
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from verl_gdpo.atomic import replace_together
from verl_gdpo.data_prep import DataError, Progress

SCHEMES = ("https", "http", "file")
CHUNK_BYTES = 1 << 16


def git_blob_id(path: Path) -> str:
    """Return the id that `git hash-object PATH` prints."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(
    url: str, path: Path, *, blob_id: str, max_bytes: int = 64 << 20, timeout_s: float = 30.0
) -> None:
    """Download `url` to `path`, unless `path` already has the right content.

    Args:
        url: the scheme is https, http or file.
        path: only a complete download with the right id replaces it. Its folder is made.
        blob_id: the file's id, as printed by `git hash-object`.
        max_bytes: a larger file is refused.
        timeout_s: the download fails if nothing arrives for this many seconds.

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
            for chunk in _chunks(url, max_bytes, timeout_s):
                file.write(chunk)
        got = git_blob_id(temporary)
        if got != blob_id:
            raise DataError(
                f"{url}: got git blob id {got} ({temporary.stat().st_size:,} bytes); expected "
                f"{blob_id}: it is another file, or the download damaged it"
            )


def _chunks(url: str, max_bytes: int, timeout_s: float) -> Iterator[bytes]:
    """Yield the bytes at `url`; raise DataError if not all of them arrive."""
    scheme = urlsplit(url).scheme
    if scheme not in SCHEMES:
        raise DataError(f"{url}: got scheme {scheme!r}; expected one of {SCHEMES}")
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            announced = response.headers.get("Content-Length", "")
            total = int(announced) if announced.isdecimal() else None
            progress = Progress(f"downloading {url}", total, "bytes")
            while received <= max_bytes and (chunk := response.read(CHUNK_BYTES)):
                received += len(chunk)
                progress.at(received)
                yield chunk
    except urllib.error.HTTPError as error:
        error.close()
        raise DataError(f"{url}: got HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise DataError(
            f"{url}: download failed after {received:,} bytes: {reason or repr(error)}"
        ) from error
    if received > max_bytes:
        raise DataError(f"{url}: got more than {max_bytes:,} bytes; expected at most that many")
    if total is not None and received != total:
        raise DataError(f"{url}: got {received:,} bytes; expected {total:,}: download cut short")
