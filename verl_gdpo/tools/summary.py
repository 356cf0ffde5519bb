"""Prints a run's rewards, findings and files, and draws the reward curves.

verl-gdpo summary RUN
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verl_gdpo.run.findings import findings
from verl_gdpo.run.folder import Metrics, gaps, training_rewards, validation_rewards
from verl_gdpo.run.outline import ENDS, NOTHING, STARTS, ends, history
from verl_gdpo.run.starts import newest_checkpoint
from verl_gdpo.run.tracker_logs import EXPECTED, Logged, read_logged
from verl_gdpo.terminal import needs_extra, printable, render

HEADER = ("reward", *ENDS)


def reward_table(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return the rows for `HEADER`, with "-" for a value that was not measured."""
    rewards = dict.fromkeys([*training_rewards(metrics), *validation_rewards(metrics)])
    found = {name: ends(metrics, name) for name in rewards}
    return [
        (printable(name), *(str(of_one.get(what, NOTHING)) for what in ENDS))
        for name, of_one in found.items()
    ]


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print(f"usage: verl-gdpo summary RUN; got {list(argv)}. RUN: {EXPECTED}", file=sys.stderr)
        return 2
    folder, logged = Path(argv[0]), None
    parts = {
        "metrics": folder / "metrics",
        "rollouts": folder / "rollouts",
        "checkpoint": newest_checkpoint(folder / "checkpoints"),
        "log": folder / "train.log",
    }
    is_ours = any(path and path.exists() for path in parts.values())
    try:
        logged = read_logged(argv[0])
    except ValueError as error:
        print(f"verl-gdpo summary: {printable(str(error))}", file=sys.stderr)
        if not is_ours:
            return 1
    if logged is not None:
        _print_metrics(logged)
        _print_rest(logged, folder, is_ours)
    if starts := history(folder):
        *columns, what = STARTS
        print(f"\n{render(columns, [[*map(printable, row[:-1])] for row in starts])}")
        for number, *_, changed in starts:
            if changed != NOTHING:
                print(f"start {number} {what}: {printable(changed)}")
        print()
    for label, path in parts.items() if is_ours else ():
        print(f"{label:<14} {path if path and path.exists() else 'none'}")
    return 0


def _print_metrics(logged: Logged) -> None:
    print(f"\n{render(HEADER, reward_table(logged.metrics))}\n")
    for finding in findings(logged.metrics):
        print(f"FINDING: {printable(str(finding))}")
    for gap in gaps(logged.metrics):
        print(f"WARNING: {printable(gap)}")


def _print_rest(logged: Logged, source: Path, is_ours: bool) -> None:
    """Draw the curves, and say what a tracker does not hold."""
    try:
        from verl_gdpo.tools.report.runs import run_of
        from verl_gdpo.tools.report.tables import inputs_of

        print(f"{'reward curves':<14} {draw_rewards(logged, source if is_ours else Path())}")
        for one in () if is_ours else inputs_of(run_of(logged, source)):
            print(printable(str(one)))
    except ImportError as error:
        print(f"{'reward curves':<14} none: {needs_extra(error)}")


def draw_rewards(logged: Logged, out: Path) -> Path:
    """Write the curves of a run to `rewards.png` in the folder `out`; return that path."""
    from verl_gdpo.tools.plots import draw
    from verl_gdpo.tools.report.charts import reward_panels
    from verl_gdpo.tools.report.runs import RunsOfArm, run_of

    run, picture = run_of(logged, Path(logged.name)), out / "rewards.png"
    panels = reward_panels([RunsOfArm("training", [run])])
    arm = run.setting("arm")
    title = f"Rewards over {max(run.metrics)} training steps" + (f" of {arm}" if arm else "")
    draw([*panels.values()], picture, title=title)
    return picture
