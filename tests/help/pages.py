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
    """The rows whose first cell is code, each as the texts of its cells without their marks."""
    rows = [row for row in cells_after(page, header) if row[0].startswith("`")]
    return [[cell.strip("`") for cell in row] for row in rows]


def cells_after(page, header, heading=""):
    """The rows of the first such table after a heading of a page, each as the texts of its cells.

    header: how the first line of the table begins.
    """
    part = PAGES[page].split(f"\n{heading}", 1)[1]
    lines = part.split(f"\n{header}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
