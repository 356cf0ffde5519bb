"""Rewards, validation and response length, arm against arm."""

import math
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
    correlation_limits,
    decimal,
    first_to_last,
    lines_of,
    looks,
    names,
    of_each_arm,
    one_of,
    recent,
)
from verl_gdpo.tools.report.what_if import Found, lengths, most_of_length

STEP, REWARD = "training step", "mean reward (higher is better)"
LENGTH, FOLLOWS = "response_length/mean", "gdpo/length_correlation"


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


def length(arms: Sequence[RunsOfArm], found: Found) -> Section:
    read, follows = partial(curve, key=LENGTH), partial(curve, key=FOLLOWS)
    lines = arm_lines(arms, read, SMOOTHED_STEPS)
    correlations = arm_lines(arms, follows, SMOOTHED_STEPS)
    limits = correlation_limits(correlations)
    title = f"Correlation of the advantage with the length, {SMOOTHED}"
    panels = {
        "response-length": Panel(f"Response length, {SMOOTHED}", STEP, "mean tokens", lines),
        "length-correlation": Panel(title, STEP, "correlation", correlations, limits),
    }
    table = lengths(arms, found)
    unknown = f"not known, because the metrics hold no {LENGTH}"
    return Section(
        "length",
        "Why does the length change?",
        "Responses get longer where the advantage follows the length within groups, and shorter "
        "where it opposes it. The table has the same correlation for the advantages that each "
        "reward would give alone: it names the reward that the length comes from. Neither longer "
        "nor shorter is better by itself.",
        [
            Chart(name, panel, f"First step to the {SMOOTHED} at the end: {first_to_last(panel)}.")
            for name, panel in panels.items()
            if panel.lines
        ],
        [
            *absent(arms, {LENGTH: read}, "verl writes it when `file` is in trainer.logger"),
            *absent(
                arms, {FOLLOWS: follows}, "verl-gdpo writes it with the estimators gdpo and grpo"
            ),
        ],
        tables=[table] if table else [],
        answer=of_each_arm(arms, partial(_length_in_words, found=found), unknown),
    )


def _length_in_words(arm: RunsOfArm, found: Found) -> str:
    """`31 tokens at first, 27 at the end; the advantage follows it with correlation 0.12`."""
    read = partial(curve, key=LENGTH)
    tokens = over_runs(arm, read)
    if tokens is None:
        return ""
    follows = recent(arm, partial(curve, key=FOLLOWS))
    said = [f"{tokens.mean[0]:.0f} tokens at first, {recent(arm, read):.0f} at the end"]
    if math.isfinite(follows):
        said.append(f"correlation with the advantage {decimal(follows)}")
    return "; ".join([*said, *most_of_length(arm, found)])
