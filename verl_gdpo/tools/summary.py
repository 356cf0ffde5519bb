"""Prints a run's rewards, findings and files, and draws the reward curves.

verl-gdpo summary RUN_FOLDER
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from verl_gdpo.run.ends import NAMES, NOTHING, ends
from verl_gdpo.run.findings import findings
from verl_gdpo.run.folder import (
    Metrics,
    gaps,
    read_config,
    read_metrics,
    training_rewards,
    validation_rewards,
)
from verl_gdpo.terminal import printable, render

HEADER = ("reward", *NAMES)


def reward_table(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return the rows for `HEADER`, with "-" for a value that was not measured."""
    rewards = dict.fromkeys([*training_rewards(metrics), *validation_rewards(metrics)])
    found = {name: ends(metrics, name) for name in rewards}
    return [
        (printable(name), *(str(of_one.get(what, NOTHING)) for what in NAMES))
        for name, of_one in found.items()
    ]


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        print(f"usage: verl-gdpo summary RUN_FOLDER; got {list(argv)}", file=sys.stderr)
        return 2
    run = Path(argv[0])
    parts = {
        "reward curves": None,
        "metrics": run / "metrics",
        "rollouts": run / "rollouts",
        "checkpoint": _latest_checkpoint(run / "checkpoints"),
        "log": run / "train.log",
    }
    if not any(path and path.exists() for path in parts.values()):
        print(f"{run}: holds no {', '.join(parts)}: not the folder of a run", file=sys.stderr)
        return 1
    metrics = read_metrics(run)
    if metrics:
        parts["reward curves"] = draw_rewards(run, metrics)
        print(f"\n{render(HEADER, reward_table(metrics))}\n")
        for finding in findings(metrics):
            print(f"FINDING: {printable(str(finding))}")
    else:
        print(f"no table: {run / 'metrics'} has no step; trainer.logger needs `file` for it")
    for gap in gaps(metrics):
        print(f"WARNING: {printable(gap)}")
    for label, path in parts.items():
        print(f"{label:<14} {path if path and path.exists() else 'none'}")
    return 0


def draw_rewards(folder: Path, metrics: Metrics) -> Path:
    """Write the curves of the run to its `rewards.png`; return that path."""
    from verl_gdpo.tools.plots import draw
    from verl_gdpo.tools.report.charts import reward_panels
    from verl_gdpo.tools.report.runs import Run, RunsOfArm, bounds_of_run

    picture, config = folder / "rewards.png", read_config(folder)
    run = Run(folder, metrics, config, bounds=bounds_of_run(folder, config))
    panels = reward_panels([RunsOfArm("training", [run])])
    arm = run.setting("arm")
    title = f"Rewards over {max(metrics)} training steps" + (f" of {arm}" if arm else "")
    draw([*panels.values()], picture, title=title)
    return picture


def _latest_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint, whose step verl 0.7.1 to 0.9 writes into the tracker."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    return folder / f"global_step_{tracker.read_text().strip()}" if tracker.exists() else None
