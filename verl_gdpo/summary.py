"""The end of a run: one table, a picture of the reward curves, and where everything is.

verl-gdpo summary RUN_FOLDER
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_gdpo.run_folder import (
    Metrics,
    gaps,
    read_metrics,
    training_rewards,
    validation_rewards,
)
from verl_gdpo.tables import printable, render

HEADER = ("reward", "first step", "last step", "validation before", "after")


def reward_table(metrics: Metrics) -> list[tuple[str, ...]]:
    """Rows under `HEADER`; "-" where nothing was measured."""
    training, validation = training_rewards(metrics), validation_rewards(metrics)
    return [
        (name, *_ends(training.get(name, {})), *_ends(validation.get(name, {})))
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
    metrics = read_metrics(run)
    if not metrics:
        print(f"{run}: no metrics yet ({run / 'metrics'} holds no step)", file=sys.stderr)
        return 1
    picture = _draw_rewards(run, metrics)
    print(f"\n{render(HEADER, reward_table(metrics))}\n")
    for gap in gaps(metrics):
        print(f"WARNING: {printable(gap)}")
    for label, path in (
        ("reward curves", picture),
        ("metrics", run / "metrics"),
        ("rollouts", run / "rollouts"),
        ("checkpoint", _latest_checkpoint(run)),
        ("log", run / "train.log"),
    ):
        print(f"{label:<14} {path if path and path.exists() else 'none'}")
    return 0


def _draw_rewards(run: Path, metrics: Metrics) -> Path:
    from verl_gdpo.plots import draw
    from verl_gdpo.report.arms import Arm, Run
    from verl_gdpo.report.charts import SMOOTHED_STEPS, reward_panels

    picture = run / "rewards.png"
    label = f"training, mean of {SMOOTHED_STEPS} steps"
    panels = reward_panels([Arm(label, [Run(run, metrics)])])
    draw(panels, picture, title=run.name)
    return picture


def _latest_checkpoint(run: Path) -> Path | None:
    folders = (run / "checkpoints").glob("global_step_*")
    return max(folders, key=lambda path: int(path.name.rsplit("_", 1)[1]), default=None)
