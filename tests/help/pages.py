"""The documents, and the rows of their tables."""

import re

from repository import REPO, tracked_files

FILES = {path.as_posix() for path in tracked_files()}
PAGES = {
    name: (REPO / name).read_text()
    for name in sorted(FILES)
    if re.fullmatch(r"(docs/|recipes/|workshop/(\w+/)?)?[^/]+\.md", name)
}


def rows_after(page, header):
    table = PAGES[page].split(header)[1].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]
