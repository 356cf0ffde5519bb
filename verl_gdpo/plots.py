"""Pictures of runs. Draws only: what is drawn comes from `run_folder`."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt

TRAINING, VALIDATION = "#0072B2", "#D55E00"  # told apart by colour-blind people, too


def draw_rewards(
    training: Mapping[str, Mapping[int, float]],
    validation: Mapping[str, Mapping[int, float]],
    path: Path,
    title: str,
) -> None:
    """One panel a reward: its mean at each step, smoothed, and its mean in validation.

    Args:
        training, validation: {reward: {step: mean}}.
        path: PNG to write.
    """
    names = list(training) or list(validation)
    figure, axes = plt.subplots(
        1, len(names), figsize=(5 * len(names), 3.6), squeeze=False, layout="constrained"
    )
    for name, panel in zip(names, axes[0], strict=True):
        steps, values = _points(training.get(name, {}))
        panel.plot(steps, values, color=TRAINING, alpha=0.3, linewidth=1)
        panel.plot(
            steps, _smooth(values), color=TRAINING, linewidth=2, label="training, mean of 5 steps"
        )
        steps, values = _points(validation.get(name, {}))
        if steps:
            panel.plot(steps, values, "o--", color=VALIDATION, linewidth=1, label="validation")
        panel.set(title=name, xlabel="step", ylabel="mean reward")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _points(curve: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def _smooth(values: list[float], window: int = 5) -> list[float]:
    """Mean of the last `window` values, of fewer at the start."""
    return [
        sum(part) / len(part)
        for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    ]
