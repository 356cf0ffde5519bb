"""What is left of the rewards in the advantage: collapse, the paper's figure, influence."""

from collections.abc import Mapping, Sequence
from functools import partial

from verl_gdpo.run.folder import curve, of_each_reward
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.arms import Arm, over_runs
from verl_gdpo.tools.report.charts import STEP
from verl_gdpo.tools.report.collapse import ESTIMATORS, distinct_groups
from verl_gdpo.tools.report.sections import (
    Chart,
    Read,
    Section,
    absent,
    arm_lines,
    first_to_last,
    last,
    names,
    one_of,
)
from verl_gdpo.tools.report.sections import line as band_line

ROLLOUTS, REWARDS = range(2, 9), range(2, 7)  # of the paper's figure
# unlike those of the first two arms, and of each other
ESTIMATOR_LOOKS = {"GDPO": 3, "GRPO": 4, "GRPO w/o std": 5}
REWARD_LOOKS = (2, 5, 3, 4, 0, 1)
DISTINCT = {"GDPO": "gdpo/distinct_gdpo", "GRPO": "gdpo/distinct_grpo"}
SHARES = {
    "gdpo/no_signal": ("Groups without a gradient", "share of groups"),
    "gdpo/cancelled": ("Rollouts whose rewards cancel", "share of rollouts"),
}
INFLUENCE = {
    "energy": ("Share", "share of squared contributions", (-0.03, 1.03)),
    "correlation": ("Correlation", "correlation with the advantage", (-1.05, 1.05)),
}
READ_INFLUENCE = {
    f"gdpo/<reward>/{statistic}": partial(of_each_reward, statistic=statistic)
    for statistic in INFLUENCE
}
WRITTEN_BY = "verl-gdpo 0.1.0 writes them with the estimators gdpo and grpo"


def collapse(arms: Sequence[Arm]) -> Section:
    charts = []
    for arm in arms:
        reads: dict[str, Read] = {name: partial(curve, key=key) for name, key in DISTINCT.items()}
        if lines := _lines_of(arm, reads, list(ESTIMATOR_LOOKS.values())):
            panel = Panel(f"Rollouts of {arm.name}", STEP, "distinct advantages", lines)
            caption = f"Distinct advantages at the last step: {last(lines, digits=0)}."
            charts.append(Chart(f"collapse-{arm.name}", panel, caption))
    for key, (title, ylabel) in SHARES.items():
        if lines := arm_lines(arms, partial(curve, key=key)):
            panel = Panel(title, STEP, ylabel, lines, ylim=(-0.03, 1.03))
            caption = f"Share at the first to the last step: {first_to_last(panel)}."
            charts.append(Chart(key.replace("/", "-"), panel, caption))
    return Section(
        "collapse",
        "Collapse of advantages",
        "How many different advantages the two estimators make of all rollouts of a step. With "
        "rewards of few values GRPO makes fewer: it gives one advantage to rollouts with different "
        "rewards. With rewards of many values it may make more, as a sum keeps how large they are "
        "and GDPO does not; what it takes for equal is then seen in the examples. The shares are "
        "of the arm's own estimator.",
        charts,
        absent(
            arms,
            {key: partial(curve, key=key) for key in (*DISTINCT.values(), *SHARES)},
            WRITTEN_BY,
        ),
    )


def paper_figure() -> Section:
    """Distinct advantage groups over the rollouts of a group, and over its rewards."""
    by_rollouts = {name: [distinct_groups(name, g, 2) for g in ROLLOUTS] for name in ESTIMATORS}
    by_rewards = {name: [distinct_groups(name, 4, n) for n in REWARDS] for name in ESTIMATORS}
    ylabel = "distinct groups of advantages"
    left = Panel("2 rewards", "rollouts in a group, G", ylabel, _counted(ROLLOUTS, by_rollouts))
    right = Panel("4 rollouts", "binary rewards, n", ylabel, _counted(REWARDS, by_rewards))
    return Section(
        "theory",
        "What an estimator can tell apart",
        "Counted, not measured: of all groups of G rollouts with n rewards of 0 or 1, how many "
        "different groups of advantages each estimator makes, before the batch step. This is the "
        "collapse figure of the GDPO paper (arXiv 2601.05242).",
        [
            Chart(
                "distinct-over-rollouts",
                left,
                f"With {ROLLOUTS[-1]} rollouts and 2 rewards: {last(left.lines, digits=0)}.",
            ),
            Chart(
                "distinct-over-rewards",
                right,
                f"With 4 rollouts and {REWARDS[-1]} rewards: {last(right.lines, digits=0)}.",
            ),
        ],
    )


def _counted(x: Sequence[int], counts: Mapping[str, Sequence[int]]) -> list[Line]:
    return [Line(name, x, counts[name], look=ESTIMATOR_LOOKS[name]) for name in counts]


def influence(arms: Sequence[Arm]) -> Section:
    charts = []
    for statistic, (title, ylabel, ylim) in INFLUENCE.items():
        read_each = READ_INFLUENCE[f"gdpo/<reward>/{statistic}"]
        reads = {name: one_of(read_each, name) for name in names(arms, read_each)}
        for arm in arms:
            if lines := _lines_of(arm, reads, REWARD_LOOKS):
                panel = Panel(f"{title}: {arm.name}", STEP, ylabel, lines, ylim)
                caption = f"{title} at the last step: {last(lines)}."
                charts.append(Chart(f"influence-{statistic}-{arm.name}", panel, caption))
    return Section(
        "influence",
        "Influence of each reward",
        "Share: how much of the squared contributions to the advantage comes from each reward; "
        "the shares add up to 1. Correlation: whether a reward pulls with the advantage (1), "
        "against it (-1), or neither (0).",
        charts,
        absent(arms, READ_INFLUENCE, WRITTEN_BY),
    )


def _lines_of(arm: Arm, reads: Mapping[str, Read], looks: Sequence[int]) -> list[Line]:
    """Several quantities of one arm."""
    return [
        band_line(name, found, looks[number % len(looks)])
        for number, (name, read) in enumerate(reads.items())
        if (found := over_runs(arm, read)) is not None
    ]
