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
    parser = argparse.ArgumentParser(
        prog="verl-gdpo report",
        description="Writes index.html, which needs nothing else. Runs "
        "whose configurations differ in seeds and names alone are an arm. Several seeds of an arm "
        "become a median with the inter-quartile range.",
    )
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help=f"any run of verl: {WHAT_A_RUN_IS}")
    add(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=RUN,RUN",
        help="these runs are seeds of one arm, whatever their configurations say",
    )
    add("--out", type=Path, help="default: report/ in the folder of a single run, or here")
    for option, metavar, what in (
        ("--config", "FILE", "configuration, if it is not in its folder"),
        ("--rollouts", "FOLDER", "dumps (trainer.rollout_data_dir)"),
    ):
        message = f"the run's {what}; give it once for each RUN, in their order"
        add(option, action="append", default=[], type=Path, metavar=metavar, help=message)
    add("--scorer", metavar="NAME", help=f"scores the samples again: {HOW}")
    add("--data-source", metavar="NAME", help="of rows without one, for --scorer")
    arguments = parser.parse_args(argv)
    chosen = [pair for named in arguments.arm for pair in _runs_of(named, parser)]
    sources = [*arguments.runs, *(run for run, _ in chosen)]
    if not sources:
        parser.error("expected a RUN, or --arm NAME=RUN,RUN")
    folder = Path(sources[0])  # a tracker's folder is left as it is
    is_ours = len(sources) == 1 and (folder / "metrics").is_dir()
    out = arguments.out or (folder / "report" if is_ours else Path("report"))
    # torch and pandas take seconds to load
    from verl_gdpo.tools.report.page import build_page, write

    try:
        scorer = Scorer.of(arguments.scorer, arguments.data_source) if arguments.scorer else None
        page = build_page(sources, arguments.config, arguments.rollouts, scorer, dict(chosen))
    except ValueError as error:
        print(f"verl-gdpo report: {error}", file=sys.stderr)
        return 1
    print(write(page, out))
    return 0


def _runs_of(named: str, parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return (run, arm) for each run of NAME=RUN,RUN."""
    arm, is_named, runs = named.partition("=")
    pairs = [(run, arm) for run in runs.split(",") if run]
    if not (arm and is_named and pairs):
        parser.error(f"--arm {named}: expected NAME=RUN,RUN, such as --arm grpo=runs/1,runs/2")
    return pairs
