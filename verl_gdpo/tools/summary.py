"""Prints a run's rewards, findings and files.

verl-gdpo summary RUN [--json]
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten

from verl_gdpo.terminal import printable, render
from verl_gdpo.tools.run.checkpoints import checkpoints_of, newest_checkpoint
from verl_gdpo.tools.run.starts import RecordedStart, starts_of
from verl_gdpo.tools.run_folder.findings import findings
from verl_gdpo.tools.run_folder.folder import ENDS, NOTHING, Metrics, ends
from verl_gdpo.tools.run_folder.tracker_logs import WHAT_A_RUN_IS, Logged, read_logged

HEADER = ("reward", *ENDS)
END_CHARACTERS = 80  # Ray's messages have hundreds
HAS_FINDING = 3  # exit code


def reward_table(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return the rows for `HEADER`, with "-" for a value that was not measured."""
    return [
        (name, *(str(of_one.get(what, NOTHING)) for what in ENDS))
        for name, of_one in ends(metrics).items()
    ]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-gdpo summary",
        description="Print the rewards, the findings and the files of a run. Exit codes: 0; 1 if "
        "there is nothing to read; 2 for wrong arguments. With --json, "
        f"{HAS_FINDING} if a finding still holds at the end of the run.",
    )
    parser.add_argument("run", metavar="RUN", help=WHAT_A_RUN_IS)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for a script")
    arguments = parser.parse_args(argv)
    return as_json(arguments.run) if arguments.json else as_text(arguments.run)


def as_json(source: str) -> int:
    """Print what a script needs of a run as one JSON object; docs/metrics.md has its keys."""
    try:
        logged = read_logged(source)
    except ValueError as error:
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
        return 1
    run_findings = findings(logged.metrics)
    record = {
        "run": logged.name,
        "tracker": logged.kind,
        "last_step": max(logged.metrics),
        "rewards": {
            name: {what: _number(end.value) for what, end in of_one.items()}
            for name, of_one in ends(logged.metrics).items()
        },
        "findings": [asdict(finding) for finding in run_findings],
    }
    print(json.dumps(record, allow_nan=False))
    return HAS_FINDING if any(not finding.is_over for finding in run_findings) else 0


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def as_text(source: str) -> int:
    folder, logged = Path(source), None
    parts = {
        "metrics": folder / "metrics",
        "rollouts": folder / "rollouts",
        "checkpoint": newest_checkpoint(checkpoints_of(folder)),
        "log": folder / "train.log",
    }
    is_ours = any(path and path.exists() for path in parts.values())
    try:
        logged = read_logged(source)
    except ValueError as error:
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
        if not is_ours:
            return 1
    if logged is not None:
        _print_metrics(logged)
        print(f"{'curves':<14} verl-gdpo report {source}")
    try:
        for recorded in starts_of(folder):
            _print_start(recorded)
    except ValueError as error:  # a manifest is damaged
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
    if is_ours:
        for label, path in parts.items():
            print(f"{label:<14} {path if path and path.exists() else 'none'}")
    return 0


def _print_start(recorded: RecordedStart) -> None:
    start, label = recorded.start, f"start {recorded.number}"
    time = start.time[:16].replace("T", " ")
    # all of it stays in the start's end.yaml
    why = shorten(str(recorded.end.get("why", "not recorded")), END_CHARACTERS, placeholder=" ...")
    print(f"{label:<14} {time}, after step {start.step}; end: {printable(why)}")
    changes = [
        f"{key}: {before} -> {after} ({verdict})"
        for key, (before, after, verdict) in start.changes.items()
    ]
    if changes or start.warnings:
        print(f"{'':<14} changed: {printable('; '.join([*changes, *start.warnings]))}")


def _print_metrics(logged: Logged) -> None:
    print(f"\n{render(HEADER, reward_table(logged.metrics))}\n")
    for finding in findings(logged.metrics):
        print(f"FINDING: {printable(str(finding))}")
