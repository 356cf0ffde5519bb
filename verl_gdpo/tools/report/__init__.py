"""A page about one run, or about arms and their seeds side by side.

verl-gdpo report RUN [RUN ...] [--arm NAME=RUN,RUN] [--out FOLDER]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_gdpo.tools.run_folder.dump_reader import HOW, Scorer
from verl_gdpo.tools.run_folder.tracker_logs import WHAT_A_RUN_IS


def main(argv: Sequence[str]) -> int:
    """Write the report and print where it is; 1 when there is nothing to report on."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    sources: list[str] = list(arguments.runs)
    arm_of: dict[Path | str, str] = {}
    for option in arguments.arm:
        arm, runs = _arm_and_runs(option, parser)
        sources += runs
        arm_of |= dict.fromkeys(runs, arm)
    if not sources:
        parser.error("expected a RUN, or --arm NAME=RUN,RUN")
    out = arguments.out
    if out is None:
        out = _usual_place(sources)

    # torch and pandas take seconds to load, and a mistake in the options needs neither.
    from verl_gdpo.tools.report.page import build_page, write

    try:
        scorer = None
        if arguments.scorer:
            scorer = Scorer.of(arguments.scorer, arguments.data_source)
        page = build_page(sources, arguments.config, arguments.rollouts, scorer, arm_of)
    except (ValueError, OSError) as error:
        print(f"verl-gdpo report: {error}", file=sys.stderr)
        return 1
    try:
        index = write(page, out)
    except OSError as error:
        print(
            f"verl-gdpo report: --out {out}: the page cannot be written: {error}. Expected a "
            "folder, or a place for one, on a disk with room",
            file=sys.stderr,
        )
        return 1
    print(index)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo report",
        description="Writes index.html, which needs nothing else. Runs "
        "whose configurations differ in seeds and names alone are an arm. Several seeds of an arm "
        "become a median with the inter-quartile range.",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"any run of verl: {WHAT_A_RUN_IS}")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=RUN,RUN",
        help="these runs are seeds of one arm, whatever their configurations say",
    )
    parser.add_argument(
        "--out", type=Path, help="default: report/ in the folder of a single run, or here"
    )
    in_order = "give it once for each RUN, in their order"
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help=f"the run's configuration, if it is not in its folder; {in_order}",
    )
    parser.add_argument(
        "--rollouts",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help=f"the run's dumps (trainer.rollout_data_dir); {in_order}",
    )
    parser.add_argument("--scorer", metavar="NAME", help=f"scores the samples again: {HOW}")
    parser.add_argument("--data-source", metavar="NAME", help="of rows without one, for --scorer")
    return parser


def _arm_and_runs(option: str, parser: argparse.ArgumentParser) -> tuple[str, list[str]]:
    """Return the arm and its runs of NAME=RUN,RUN; end the program where it is none."""
    arm, is_named, text = option.partition("=")
    runs = [run for run in text.split(",") if run]
    if not (arm and is_named and runs):
        parser.error(f"--arm {option}: expected NAME=RUN,RUN, such as --arm grpo=runs/1,runs/2")
    return arm, runs


def _usual_place(sources: Sequence[str]) -> Path:
    """Return the folder of the report where the user names none."""
    folder = Path(sources[0])
    # The folder of a tracker is left as it is: only that of our recipes gets a report.
    if len(sources) == 1 and (folder / "metrics").is_dir():
        return folder / "report"
    return Path("report")
