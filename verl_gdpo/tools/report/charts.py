"""Rewards, validation and response length, arm against arm."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from verl_gdpo.advantage.variants import Bounds
from verl_gdpo.run.folder import curve, training_rewards, validation_rewards
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.runs import RunsOfArm, over_runs
from verl_gdpo.tools.report.sections import (
    SMOOTHED,
    SMOOTHED_STEPS,
    Chart,
    Section,
    absent,
    arm_lines,
    first_to_last,
    lines_of,
    looks,
    names,
    one_of,
)

STEP, REWARD = "training step", "mean reward (higher is better)"
LENGTH = "response_length/mean"


def reward_panels(arms: Sequence[RunsOfArm]) -> dict[str, Panel]:
    """One panel a reward: each arm's training, smoothed, and its validation as markers."""
    panels = {}
    for name in names(arms, training_rewards) or names(arms, validation_rewards):
        lines = [
            drawn
            for look, arm in zip(looks(arms), arms, strict=True)
            for drawn in _reward_lines(arm, name, look)
        ]
        if len(arms) == 1 and len(arms[0].runs) == 1:
            lines = [_with_each_step(arms[0], name, drawn) for drawn in lines]
        title = f"{name}, {SMOOTHED}"
        panels[name] = Panel(title, STEP, REWARD, lines, bounds=_bounds(arms, name))
    return panels


def _bounds(arms: Sequence[RunsOfArm], name: str) -> Bounds | None:
    """Those of a reward that every run declares; None if one does not, or if they differ."""
    declared = {run.bounds.get(name) for arm in arms for run in arm.runs}
    return declared.pop() if len(declared) == 1 else None


def _with_each_step(arm: RunsOfArm, name: str, drawn: Line) -> Line:
    """The unsmoothed curve behind; more than one would hide the lines."""
    raw = over_runs(arm, one_of(training_rewards, name))
    return drawn if drawn.only_markers or raw is None else replace(drawn, behind=raw.median)


def _reward_lines(arm: RunsOfArm, name: str, look: int) -> list[Line]:
    lines = lines_of(arm, one_of(training_rewards, name), arm.name, look, SMOOTHED_STEPS)
    measured = over_runs(arm, one_of(validation_rewards, name))
    if measured is not None:
        marks = Line("validation", measured.steps, measured.median, look=look, only_markers=True)
        lines.append(marks)
    return lines


def rewards(arms: Sequence[RunsOfArm]) -> Section:
    return Section(
        "rewards",
        "Rewards in training",
        f"Mean over the samples of a step. Lines are the mean of the last {SMOOTHED_STEPS} steps, "
        "for a single run with each step behind them; hollow markers are validation. "
        "The lowest and the highest possible value are drawn where they are declared.",
        [
            Chart(
                f"reward-{name}",
                panel,
                f"First step to the mean of the last {SMOOTHED_STEPS}: {first_to_last(panel)}.",
            )
            for name, panel in reward_panels(arms).items()
        ],
        absent(
            arms,
            {"gdpo/<reward>/mean": training_rewards},
            "verl-gdpo writes them when the estimator or the reward manager is gdpo",
        ),
    )


def validation(arms: Sequence[RunsOfArm]) -> Section:
    charts = []
    for name in names(arms, validation_rewards):
        lines = arm_lines(arms, one_of(validation_rewards, name))
        title = f"{name} in validation"
        panel = Panel(title, STEP, REWARD, lines, bounds=_bounds(arms, name))
        caption = f"First to last validation: {first_to_last(panel)}."
        charts.append(Chart(f"validation-{name}", panel, caption))
    return Section(
        "validation",
        "Validation",
        "Mean reward on rows that training never shows.",
        charts,
        absent(
            arms,
            {"val-aux/<source>/<reward>/mean@N": validation_rewards},
            "verl writes them with trainer.test_freq=STEPS and trainer.val_before_train=True",
        ),
    )


def length(arms: Sequence[RunsOfArm]) -> Section:
    read = partial(curve, key=LENGTH)
    panel = Panel("Response length", STEP, "mean response tokens", arm_lines(arms, read))
    caption = f"First to last step: {first_to_last(panel, digits=0)} tokens."
    return Section(
        "length",
        "Response length",
        "Neither longer nor shorter is better; a sudden change is worth a look at the examples.",
        [Chart("response-length", panel, caption)] if panel.lines else [],
        absent(arms, {LENGTH: read}, "verl writes it when `file` is in trainer.logger"),
    )
