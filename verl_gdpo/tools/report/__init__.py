"""A page about one run, or about arms and their seeds side by side.

verl-gdpo report RUN_FOLDER [RUN_FOLDER ...] [--out FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Write the report and print where it is; 1 when there is nothing to report on."""
    parser = argparse.ArgumentParser(
        prog="verl-gdpo report",
        description="Writes index.html, which needs nothing else, and its pictures as PNG. Runs "
        "are grouped by `arm` of their configuration: several seeds of an arm become a median "
        "with the inter-quartile range.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_FOLDER")
    parser.add_argument(
        "--out", type=Path, help="default: RUN_FOLDER/report, or ./report for several runs"
    )
    arguments = parser.parse_args(argv)
    # torch and matplotlib take seconds to load
    from verl_gdpo.tools.report.build import build_page
    from verl_gdpo.tools.report.page import write

    out = arguments.out or (
        arguments.runs[0] / "report" if len(arguments.runs) == 1 else Path("report")
    )
    try:
        page = build_page(arguments.runs)
    except ValueError as error:
        print(f"verl-gdpo report: {error}", file=sys.stderr)
        return 1
    print(write(page, out))
    return 0
