"""Prints a run's rewards, findings and files.

verl-gdpo summary RUN [--json]
"""

import argparse
import json
import math
import shlex
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
# Ray's messages have hundreds of characters.
END_CHARACTERS = 80
HAS_FINDING = 3  # exit code


def reward_table(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return the rows for `HEADER`, with "-" for a value that was not measured."""
    rows: list[tuple[str, ...]] = []
    for name, of_one in ends(metrics).items():
        values = [str(of_one.get(what, NOTHING)) for what in ENDS]
        rows.append((name, *values))
    return rows


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
    if arguments.json:
        return as_json(arguments.run)
    return as_text(arguments.run)


def as_json(source: str) -> int:
    """Print what a script needs of a run as one JSON object; docs/metrics.md has its keys."""
    try:
        logged = read_logged(source)
    except (ValueError, OSError) as error:
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
        return 1
    rewards = {}
    for name, of_one in ends(logged.metrics).items():
        rewards[name] = {what: _number(end.value) for what, end in of_one.items()}
    run_findings = findings(logged.metrics)
    record = {
        "run": logged.name,
        "tracker": logged.kind,
        "last_step": max(logged.metrics),
        "rewards": rewards,
        "findings": [asdict(finding) for finding in run_findings],
    }
    print(json.dumps(record, allow_nan=False))
    if all(finding.is_over for finding in run_findings):
        return 0
    return HAS_FINDING


def _number(value: float) -> float | None:
    """Return a value as JSON can hold it, which has no NaN."""
    if math.isfinite(value):
        return value
    return None


def as_text(source: str) -> int:
    """Print what a reader wants to know of a run."""
    folder = Path(source)
    parts = {
        "metrics": folder / "metrics",
        "rollouts": folder / "rollouts",
        "checkpoint": newest_checkpoint(checkpoints_of(folder)),
        "log": folder / "train.log",
    }
    is_ours = any(_is_there(path) for path in parts.values())
    try:
        logged = read_logged(source)
    except (ValueError, OSError) as error:
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
        if not is_ours:
            return 1
    else:
        _print_metrics(logged)
        print(f"{'curves':<14} verl-gdpo report {shlex.quote(source)}")
    try:
        for recorded in starts_of(folder):
            _print_start(recorded)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        # A manifest is damaged, or cannot be read.
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
    if is_ours:
        for label, path in parts.items():
            shown = path if _is_there(path) else "none"
            print(f"{label:<14} {shown}")
    return 0


def _is_there(path: Path | None) -> bool:
    return path is not None and path.exists()


def _print_start(recorded: RecordedStart) -> None:
    start = recorded.start
    label = f"start {recorded.number}"
    time = start.time[:16].replace("T", " ")
    # The whole reason stays in the start's end.yaml.
    why = shorten(str(recorded.end.get("why", "not recorded")), END_CHARACTERS, placeholder=" ...")
    print(f"{label:<14} {time}, after step {start.step}; end: {printable(why)}")
    changes = []
    for key, (before, after, verdict) in start.changes.items():
        changes.append(f"{key}: {before} -> {after} ({verdict})")
    changes.extend(start.warnings)
    if changes:
        print(f"{'':<14} changed: {printable('; '.join(changes))}")


def _print_metrics(logged: Logged) -> None:
    print(f"\n{render(HEADER, reward_table(logged.metrics))}\n")
    for finding in findings(logged.metrics):
        print(f"FINDING: {printable(str(finding))}")
