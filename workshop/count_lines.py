"""Counts the lines of code by room, without docstrings, comments and blank lines.

python -m workshop.count_lines          # of the files that git tracks, as they are now
python -m workshop.count_lines v1.0     # of a revision

A module of the package counts as code; what it carries for others, such as recipes, templates and
data, is counted apart.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "verl_gdpo"
# programs apart from the package, by the first folder of their names
OTHERS = ("workshop", "tests", "docs", "examples", "data_prep")
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


class Count(NamedTuple):
    files: int
    lines: int


def code_lines(source: str) -> int:
    """Lines on which a token of code stands that is no docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - set(_docstring_lines(source)))


def _docstring_lines(source: str) -> Iterator[int]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            yield from range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def tracked(revision: str | None) -> Iterator[tuple[str, bytes]]:
    """(path, content) of each file that git tracks; symbolic links are left out."""
    command = ["ls-tree", "-r", revision] if revision else ["ls-files", "--stage"]
    for line in _git(*command).decode().splitlines():
        about, path = line.split("\t")
        if about.startswith("100") and (revision or (ROOT / path).exists()):
            content = _git("show", f"{revision}:{path}") if revision else (ROOT / path).read_bytes()
            yield path, content


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def count(revision: str | None = None) -> tuple[dict[str, Count], Count]:
    """Return ({room: its code}, what the package carries that is no code)."""
    rooms: dict[str, Count] = defaultdict(lambda: Count(0, 0))
    carried = Count(0, 0)
    for path, content in tracked(revision):
        parts = path.split("/")
        if path.endswith(".py") and parts[0] in (PACKAGE, *OTHERS):
            room = _room(parts)
            rooms[room] = _with(rooms[room], code_lines(content.decode()))
        elif parts[0] == PACKAGE:
            carried = _with(carried, content.count(b"\n"))
    return dict(rooms), carried


def _room(parts: list[str]) -> str:
    depth = 2 if parts[0] == PACKAGE and len(parts) > 2 else 1
    return "".join(f"{part}/" for part in parts[:depth])


def _with(before: Count, lines: int) -> Count:
    return Count(before.files + 1, before.lines + lines)


def main() -> None:
    rooms, carried = count(*sys.argv[1:2])
    of_package = [room for room in sorted(rooms) if room.startswith(PACKAGE)]
    total = Count(*(sum(numbers) for numbers in zip(*map(rooms.get, of_package), strict=True)))
    rows = [(room, rooms[room]) for room in of_package]
    rows += [("the package", total), ("templates and data in it", carried)]
    rows += [(room, rooms[room]) for room in sorted({*rooms} - {*of_package})]
    for name, (files, lines) in rows:
        print(f"{name:28}{files:5} files{lines:8,} lines")


if __name__ == "__main__":
    main()
