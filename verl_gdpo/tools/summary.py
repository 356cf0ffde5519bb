"""Prints a table of a run's rewards and the paths of its files, and draws the reward curves.

verl-gdpo summary RUN_FOLDER
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_gdpo.run.folder import (
    Metrics,
    gaps,
    read_metrics,
    training_rewards,
    validation_rewards,
)
from verl_gdpo.terminal import printable, render

HEADER = ("reward", "first step", "last step", "validation before", "after")


def reward_table(metrics: Metrics) -> list[tuple[str, ...]]:
    """Return the rows for `HEADER`, with "-" for a value that was not measured."""
    training, validation = training_rewards(metrics), validation_rewards(metrics)
    return [
        (printable(name), *_ends(training.get(name, {})), *_ends(validation.get(name, {})))
        for name in dict.fromkeys([*training, *validation])
    ]


def _ends(curve: Mapping[int, float]) -> tuple[str, str]:
    if not curve:
        return "-", "-"
    return f"{curve[min(curve)]:.3f}", f"{curve[max(curve)]:.3f}"


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
        parts["reward curves"] = _draw_rewards(run, metrics)
        print(f"\n{render(HEADER, reward_table(metrics))}\n")
    else:
        print(f"no step in {run / 'metrics'}, so no table: trainer.logger needs `file` for it")
    for gap in gaps(metrics):
        print(f"WARNING: {printable(gap)}")
    for label, path in parts.items():
        print(f"{label:<14} {path if path and path.exists() else 'none'}")
    return 0


def _draw_rewards(run: Path, metrics: Metrics) -> Path:
    from verl_gdpo.tools.plots import draw
    from verl_gdpo.tools.report.arms import Arm, Run
    from verl_gdpo.tools.report.charts import SMOOTHED_STEPS, reward_panels

    picture = run / "rewards.png"
    label = f"training, mean of {SMOOTHED_STEPS} steps"
    panels = reward_panels([Arm(label, [Run(run, metrics)])])
    draw(panels, picture, title=run.name)
    return picture


def _latest_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint, whose step verl 0.7.1 to 0.9 writes into the tracker."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    return folder / f"global_step_{tracker.read_text().strip()}" if tracker.exists() else None
