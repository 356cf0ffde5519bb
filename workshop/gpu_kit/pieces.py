"""A folder as files of limited size with SHA-256 sums, and back. Uses the standard library alone.

core.tar.00, core.tar.01, ...    one tar archive, cut
core.sha256                      the sum of each piece, as `sha256sum -c` reads it
"""

import hashlib
import shutil
import tarfile
import tempfile
from pathlib import Path

PIECE_BYTES = 56_000_000


def split(folder: Path, level: str, out: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Write the content of `folder` as the pieces of `level` into `out`, and return the pieces.

    Pieces of an earlier call are removed. The list of sums is written last.
    """
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob(f"{level}.tar.*"), out / f"{level}.sha256"):
        old.unlink(missing_ok=True)
    pieces: list[Path] = []
    with tempfile.TemporaryFile(dir=out) as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    tar.add(path, path.relative_to(folder).as_posix())
        archive.seek(0)
        while content := archive.read(piece_bytes):
            pieces.append(out / f"{level}.tar.{len(pieces):02}")
            pieces[-1].write_bytes(content)
    sums = "".join(f"{sha256(piece)}  {piece.name}\n" for piece in pieces)
    (out / f"{level}.sha256").write_text(sums)
    return pieces


def join(pieces: Path, level: str, folder: Path) -> None:
    """Check the pieces of `level`, and unpack them into `folder`.

    Raises:
        ValueError: the list of sums or a piece is missing, or a piece is damaged; names each.
    """
    sums = _sums(pieces, level)
    problems = []
    for name, expected in sums.items():
        if not (pieces / name).is_file():
            problems.append(f"{name} is missing")
        elif (got := sha256(pieces / name)) != expected:
            problems.append(f"{name} is damaged: SHA-256 {got}, expected {expected}")
    if problems:
        raise ValueError(f"{pieces}: {'; '.join(problems)}. Copy these again")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as archive:
        for name in sums:
            with (pieces / name).open("rb") as piece:
                shutil.copyfileobj(piece, archive)
        archive.seek(0)
        with tarfile.open(fileobj=archive) as tar:
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(folder)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _sums(pieces: Path, level: str) -> dict[str, str]:
    """{piece: sum}, in the order in which they are joined."""
    listed = pieces / f"{level}.sha256"
    if not listed.is_file():
        raise ValueError(f"{listed} is missing; workshop.gpu_kit.pack writes it with the pieces")
    lines = [line.split() for line in listed.read_text().splitlines()]
    return {name: digest for digest, name in lines}
