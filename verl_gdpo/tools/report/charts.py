"""The charts of the report: rewards, what is left of them in the advantage, and the length."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from verl_gdpo.batch.advantages import correlation, scalars_of, within_groups
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.rows import RewardError
from verl_gdpo.run.dump_reader import LAST_DUMPS, read_dump, reward_rows
from verl_gdpo.run.folder import curve, of_each_reward, training_rewards, validation_rewards
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.examples import settings_of
from verl_gdpo.tools.report.runs import Run, RunsOfArm, listed, over_runs
from verl_gdpo.tools.report.sections import (
    SMOOTHED,
    SMOOTHED_STEPS,
    Chart,
    Section,
    absent,
    arm_lines,
    decimal,
    first_to_last,
    lines_of,
    looks,
    names,
    of_each_arm,
    one_of,
    recent,
)

STEP = "training step"
LENGTH, FOLLOWS = "response_length/mean", "gdpo/length_correlation"
# {statistic of each reward: (title, axis)}
OF_EACH_REWARD = {
    "share": ("share of each reward in the advantage", "share of the advantage"),
    "correlation": ("correlation of each reward with the advantage", "correlation"),
    "varies": ("groups in which a reward differs", "share of groups"),
}
REWARD_LOOKS = (4, 5, 1, 2, 3, 0)  # the first are unlike those of two arms
TIED = {"GDPO": "gdpo/tied_pairs_gdpo", "GRPO": "gdpo/tied_pairs_grpo"}
DISTINCT = {"GDPO": "gdpo/distinct_gdpo", "GRPO": "gdpo/distinct_grpo"}
SHARES = ("gdpo/no_signal", "gdpo/cancelled")
# {metric of an arm: (name of the chart, title, axis)}
OF_AN_ARM = {
    LENGTH: ("response-length", f"Response length, {SMOOTHED}", "mean tokens"),
    FOLLOWS: (
        "length-correlation",
        f"Correlation of the advantage with the length, {SMOOTHED}",
        "correlation",
    ),
    "gdpo/no_signal": ("gdpo-no_signal", "Groups without a gradient", "share of groups"),
    "gdpo/cancelled": ("gdpo-cancelled", "Rollouts whose rewards cancel", "share of rollouts"),
}
AT_THE_END = f"First step to the {SMOOTHED} at the end"
AT_LAST = "Share at the first to the last step"
NOT_LOGGED = "not known, because the metrics hold no gdpo/<reward>/{}"
WRITTEN_BY = "verl-gdpo 0.1.0 writes them with the estimators gdpo and grpo"


def rewards(arms: Sequence[RunsOfArm]) -> Section:
    return Section(
        "rewards",
        "Rewards in training",
        f"Mean over the samples of a step. Lines are the mean of the last {SMOOTHED_STEPS} steps, "
        "for a single run with each step behind them; hollow markers are validation, on rows that "
        "training never shows. The lowest and the highest possible value are drawn where they are "
        "declared.",
        [
            Chart(f"reward-{name}", panel, _from_first_to_last(panel))
            for name, panel in reward_panels(arms).items()
        ],
        [
            *absent(
                arms,
                {"gdpo/<reward>/mean": training_rewards},
                "verl-gdpo writes them when the estimator or the reward manager is gdpo",
            ),
            *absent(
                arms,
                {"val-aux/<source>/<reward>/mean@N": validation_rewards},
                "verl writes them with trainer.test_freq=STEPS and trainer.val_before_train=True",
            ),
        ],
    )


def _from_first_to_last(panel: Panel, says: str = AT_THE_END, digits: int = 2) -> str:
    said = first_to_last(panel, digits)
    return f"{says}: {said}." if said else "Measured in validation alone."


def reward_panels(arms: Sequence[RunsOfArm]) -> dict[str, Panel]:
    """One panel a reward: each arm's training, smoothed, and its validation as markers."""
    panels = {}
    is_single = len(arms) == 1 and len(arms[0].runs) == 1
    for name in dict.fromkeys([*names(arms, training_rewards), *names(arms, validation_rewards)]):
        lines = [
            drawn
            for look, arm in zip(looks(arms), arms, strict=True)
            for drawn in _reward_lines(arm, name, look, with_each_step=is_single)
        ]
        # None if a run declares no bounds, or if they differ
        declared = {run.bounds.get(name) for arm in arms for run in arm.runs}
        bounds = declared.pop() if len(declared) == 1 else None
        ylabel = "mean reward (higher is better)"
        panels[name] = Panel(f"{name}, {SMOOTHED}", STEP, ylabel, lines, bounds=bounds)
    return panels


def _reward_lines(arm: RunsOfArm, name: str, look: int, with_each_step: bool) -> list[Line]:
    """The smoothed training, each step behind it if there is one run alone, and validation."""
    read = one_of(training_rewards, name)
    lines = lines_of(arm, read, arm.name, look, SMOOTHED_STEPS)
    if with_each_step and (raw := over_runs(arm, read)):
        lines = [replace(drawn, behind=raw.median) for drawn in lines]
    if measured := over_runs(arm, one_of(validation_rewards, name)):
        marks = Line("validation", measured.steps, measured.median, look=look, only_markers=True)
        lines.append(marks)
    return lines


def influence(arms: Sequence[RunsOfArm]) -> Section:
    return Section(
        "influence",
        "Which reward drives the update?",
        "Share: how much of the advantage comes from each reward, which is the covariance of its "
        "contribution with the sum of all, over the variance of that sum. The shares add up to 1; "
        "one below 0 pulls against the others. Correlation: whether a reward pulls with the "
        "advantage (1), against it (-1), or neither (0). What another weight would change: "
        "`verl-gdpo replay RUN algorithm.gdpo.rewards.NAME=WEIGHT`.",
        _charts_of(arms, "share", "correlation"),
        _absent_statistics(arms, "share", "correlation"),
        answer=of_each_arm(arms, _shares_in_words, NOT_LOGGED.format("share")),
    )


def _shares_in_words(arm: RunsOfArm) -> str:
    """`of the advantage, correctness 0.72, format 0.28`, the largest first."""
    shares = recent_of_each(arm, "share")
    names = sorted(shares, key=lambda name: -abs(shares[name]))
    said = listed([f"{name} {decimal(shares[name])}" for name in names])
    return f"of the advantage, {said}" if said else ""


def saturation(arms: Sequence[RunsOfArm]) -> Section:
    return Section(
        "saturation",
        "Is a reward dead or saturated?",
        "A reward trains only in the groups in which it differs between rollouts. Where it differs "
        "in none it is reached everywhere, reached nowhere, or constant: the shares of samples at "
        "its highest and lowest possible value tell which, where these are declared.",
        _charts_of(arms, "varies"),
        _absent_statistics(arms, "varies"),
        answer=of_each_arm(arms, _saturation_in_words, NOT_LOGGED.format("varies")),
    )


def _saturation_in_words(arm: RunsOfArm) -> str:
    """`format differs in 5% of the groups (98% of the samples at its highest value)`."""
    varies = recent_of_each(arm, "varies")
    bounds = {end: recent_of_each(arm, f"at_{end}") for end in ("high", "low")}
    said: list[str] = []
    for name in sorted(varies, key=lambda name: varies[name]):
        at = {end: shares.get(name, 0.0) for end, shares in bounds.items()}
        end = max(at, key=lambda end: at[end])
        samples = f" ({at[end]:.0%} of the samples at its {end}est value)" if at[end] > 0.5 else ""
        where = "of the groups" if not said else ""
        said.append(f"{name} differs in {varies[name]:.0%} {where}".rstrip() + samples)
    return listed(said)


def recent_of_each(arm: RunsOfArm, statistic: str) -> dict[str, float]:
    """{reward: mean of its last steps}; without those that no run logs."""
    read_each = partial(of_each_reward, statistic=statistic)
    found = {name: recent(arm, one_of(read_each, name)) for name in names([arm], read_each)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _charts_of(arms: Sequence[RunsOfArm], *statistics: str) -> list[Chart]:
    return [chart for one in statistics for arm in arms for chart in chart_of_each_reward(arm, one)]


def chart_of_each_reward(arm: RunsOfArm, statistic: str) -> list[Chart]:
    """A smoothed line for each reward; no chart where no run has the metrics.

    Args:
        statistic: a key of `OF_EACH_REWARD`.
    """
    what, ylabel = OF_EACH_REWARD[statistic]
    read_each = partial(of_each_reward, statistic=statistic)
    lines = []
    for number, name in enumerate(names([arm], read_each)):
        # when the looks are used up they come again with a change
        again, which = divmod(number, len(REWARD_LOOKS))
        look = REWARD_LOOKS[which] + again * len(REWARD_LOOKS)
        lines += lines_of(arm, one_of(read_each, name), name, look, SMOOTHED_STEPS)
    return _chart(f"{statistic}-{arm.name}", f"{arm.name}: {what}, {SMOOTHED}", ylabel, lines)


def _chart(
    name: str,
    title: str,
    ylabel: str,
    lines: Sequence[Line],
    says: str = AT_THE_END,
    digits: int = 2,
) -> list[Chart]:
    """The chart of some lines, if there are any. Shares and correlations have axes from 0 to 1."""
    ylim = None
    if ylabel == "correlation" or ylabel.startswith("share"):
        values = [y for line in lines for y in line.y if math.isfinite(y)]
        ylim = (min([-0.03, *(1.05 * y for y in values)]), max([1.05, *(1.05 * y for y in values)]))
    panel = Panel(title, STEP, ylabel, lines, ylim)
    return [Chart(name, panel, _from_first_to_last(panel, says, digits))] if lines else []


def _chart_of_arms(arms: Sequence[RunsOfArm], key: str, smooth: int = 1) -> list[Chart]:
    """A line for each arm that has the metric, a key of `OF_AN_ARM`."""
    name, title, ylabel = OF_AN_ARM[key]
    lines = arm_lines(arms, partial(curve, key=key), smooth)
    return _chart(name, title, ylabel, lines, AT_THE_END if smooth > 1 else AT_LAST)


def _absent_statistics(arms: Sequence[RunsOfArm], *statistics: str) -> list[str]:
    reads = {f"gdpo/<reward>/{one}": partial(of_each_reward, statistic=one) for one in statistics}
    return absent(arms, reads, WRITTEN_BY)


def length(arms: Sequence[RunsOfArm]) -> Section:
    return Section(
        "length",
        "Why does the length change?",
        "Responses get longer where the advantage follows the length within groups, and shorter "
        "where it opposes it. The rewards named above are those whose advantages, if they were "
        "alone, would follow the length most, over the last dumps of the first run. Neither longer "
        "nor shorter is better by itself.",
        [chart for key in (LENGTH, FOLLOWS) for chart in _chart_of_arms(arms, key, SMOOTHED_STEPS)],
        [
            *_absent_keys(arms, "verl writes it when `file` is in trainer.logger", LENGTH),
            *_absent_keys(arms, "verl-gdpo writes it with the estimators gdpo and grpo", FOLLOWS),
        ],
        answer=of_each_arm(
            arms, _length_in_words, f"not known, because the metrics hold no {LENGTH}"
        ),
    )


def _length_in_words(arm: RunsOfArm) -> str:
    """`31 tokens at first, 27 at the end; correlation with the advantage 0.12`."""
    read = partial(curve, key=LENGTH)
    tokens = over_runs(arm, read)
    if tokens is None:
        return ""
    follows = recent(arm, partial(curve, key=FOLLOWS))
    said = [f"{tokens.mean[0]:.0f} tokens at first, {recent(arm, read):.0f} at the end"]
    if math.isfinite(follows):
        said.append(f"correlation with the advantage {decimal(follows)}")
    alone = follow_length(arm.runs[0])
    ordered = sorted(alone, key=lambda name: -abs(alone[name]))
    if alone:
        said.append("of " + listed([f"{name} alone {decimal(alone[name])}" for name in ordered]))
    return "; ".join(said)


def follow_length(run: Run) -> dict[str, float]:
    """{reward: how the advantages that it alone would give under GDPO follow the length}.

    These are correlations within groups, over the last dumps; without dumps there are none.
    """
    try:
        settings = settings_of(run)
        steps = [
            _follow_length(read_dump(file, run.scorer, with_texts=False), int(file.stem), settings)
            for file in run.dumps()[-LAST_DUMPS:]
        ]
    except (ValueError, RewardError):  # the section of the examples says it
        return {}
    found = pd.DataFrame(steps, dtype=float).mean().dropna()
    return {str(name): value for name, value in found.items()}


def _follow_length(
    dump: Sequence[Mapping[str, Any]], number: int, settings: GdpoSettings
) -> dict[str, float | None]:
    rows = reward_rows(dump, number)
    matrix, counted_B = RewardMatrix.of(rows, settings), rows.counted_B
    ids = np.array([row["group"] for row in dump])
    z_BK = scalars_of(matrix, counted_B, ids, settings).z_BK.numpy()[counted_B]
    group_B = np.unique(ids[counted_B], return_inverse=True)[1]
    # verl's own dumps have no lengths; nothing correlates with equal ones
    length_B = np.array([row["response_tokens"] or 0 for row in dump])[counted_B]
    of_group_B = within_groups(length_B, group_B)
    return {
        name: correlation(np.sign(weight) * z_B, of_group_B)
        for (name, weight), z_B in zip(matrix.weights.items(), z_BK.T, strict=True)
        if weight
    }


def collapse(arms: Sequence[RunsOfArm]) -> Section:
    tied = [_of_both(arm, TIED, "tied pairs", "share of pairs") for arm in arms]
    shares = [_chart_of_arms(arms, key) for key in SHARES]
    distinct = [_of_both(arm, DISTINCT, "distinct advantages", "in a step") for arm in arms]
    return Section(
        "collapse",
        "Collapse of advantages",
        "Tied pairs: of the pairs of rollouts of a group with different rewards, the share to "
        "which an estimator gives one advantage. With rewards of few values GRPO ties many. With "
        "a reward of many values it may tie fewer than GDPO: what GDPO changes then is which "
        "reward counts, not what is told apart. Distinct advantages pool the groups of a step, so "
        "that groups which differ in scale alone count as different. The shares of groups and of "
        "rollouts are of the arm's own estimator.",
        [chart for charts in (*tied, *shares, *distinct) for chart in charts],
        _absent_keys(arms, WRITTEN_BY, *TIED.values(), *SHARES, *DISTINCT.values()),
    )


def _of_both(arm: RunsOfArm, keys: Mapping[str, str], what: str, ylabel: str) -> list[Chart]:
    """What GDPO and GRPO make of the rewards of one arm."""
    lines = [
        line
        for look, (name, key) in enumerate(keys.items())
        for line in lines_of(arm, partial(curve, key=key), name, look)
    ]
    says = f"{what.capitalize()} at the first to the last step"
    name, digits = f"{what.split()[0]}-{arm.name}", 3 if keys is TIED else 0
    return _chart(name, f"{arm.name}: {what}", ylabel, lines, says, digits)


def _absent_keys(arms: Sequence[RunsOfArm], source: str, *keys: str) -> list[str]:
    return absent(arms, {key: partial(curve, key=key) for key in keys}, source)
