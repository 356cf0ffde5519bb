"""What is left of the rewards in the advantage: collapse and influence."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle

from verl_gdpo.run.folder import Metrics, curve, of_each_reward
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.charts import STEP
from verl_gdpo.tools.report.runs import Curve, RunsOfArm, over_runs
from verl_gdpo.tools.report.sections import (
    FEWEST_FOR_BAND,
    SMOOTHED,
    SMOOTHED_STEPS,
    Chart,
    Read,
    Section,
    absent,
    arm_lines,
    first_to_last,
    last,
    lines_of,
    names,
    one_of,
)

# neighbours in a stack differ much in lightness; the first are unlike those of two arms
REWARD_LOOKS = (4, 5, 1, 2, 3, 0)
TIED = {"GDPO": "gdpo/tied_pairs_gdpo", "GRPO": "gdpo/tied_pairs_grpo"}
DISTINCT = {"GDPO": "gdpo/distinct_gdpo", "GRPO": "gdpo/distinct_grpo"}
SHARES = {
    "gdpo/no_signal": ("Groups without a gradient", "share of groups"),
    "gdpo/cancelled": ("Rollouts whose rewards cancel", "share of rollouts"),
}
READ_INFLUENCE = {
    f"gdpo/<reward>/{statistic}": partial(of_each_reward, statistic=statistic)
    for statistic in ("share", "energy", "correlation")
}
WRITTEN_BY = "verl-gdpo 0.1.0 writes them with the estimators gdpo and grpo"


def collapse(arms: Sequence[RunsOfArm]) -> Section:
    charts = []
    for key, (title, ylabel) in SHARES.items():
        if lines := arm_lines(arms, partial(curve, key=key)):
            panel = Panel(title, STEP, ylabel, lines, ylim=(-0.03, 1.03))
            caption = f"Share at the first to the last step: {first_to_last(panel)}."
            charts.append(Chart(key.replace("/", "-"), panel, caption))
    tied = [_of_both(arm, TIED, "tied pairs", "share of pairs") for arm in arms]
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
        [chart for chart in (*tied, *charts, *distinct) if chart is not None],
        absent(
            arms,
            {key: partial(curve, key=key) for key in (*TIED.values(), *SHARES, *DISTINCT.values())},
            WRITTEN_BY,
        ),
    )


def _of_both(arm: RunsOfArm, keys: Mapping[str, str], what: str, ylabel: str) -> Chart | None:
    """What GDPO and GRPO make of the rewards of one arm."""
    reads: dict[str, Read] = {name: partial(curve, key=key) for name, key in keys.items()}
    lines = _lines_of(arm, reads, range(len(reads)))
    if not lines:
        return None
    is_share = keys is TIED
    ylim = (-0.03, 1.03) if is_share else None
    panel = Panel(f"{arm.name}: {what}", STEP, ylabel, lines, ylim=ylim)
    caption = f"{what.capitalize()} at the last step: {last(lines, digits=3 * is_share)}."
    return Chart(f"{what.split()[0]}-{arm.name}", panel, caption)


def influence(arms: Sequence[RunsOfArm]) -> Section:
    of_arm = (_share_chart, energy_chart, _correlation_chart)
    found = [make(arm) for make in of_arm for arm in arms]
    return Section(
        "influence",
        "Influence of each reward",
        "Share: how much of the advantage comes from each reward, which is the covariance of its "
        "contribution with the sum of all, over the variance of that sum. The shares add up to 1; "
        "one below 0 pulls against the others. Energy: its share of the squared contributions, of "
        "which rewards that cancel have much. Its areas are the mean of the last "
        f"{SMOOTHED_STEPS} steps, and of the runs of an arm; for a single run, thin lines are "
        "each step by itself. Correlation: whether a reward pulls with the advantage (1), against "
        "it (-1), or neither (0).",
        [chart for chart in found if chart is not None],
        absent(arms, READ_INFLUENCE, WRITTEN_BY),
    )


def _share_chart(arm: RunsOfArm) -> Chart | None:
    lines = _of_each(arm, "share")
    if not lines:
        return None
    title = f"{arm.name}: share of each reward in the advantage"
    panel = Panel(title, STEP, "share of the advantage", lines)
    caption = f"Share at the first to the last step: {first_to_last(panel)}."
    return Chart(f"influence-share-{arm.name}", panel, caption)


def energy_chart(arm: RunsOfArm) -> Chart | None:
    """Stacked areas; of several runs the mean, because medians do not add up to 1.

    None where no run has the metrics.
    """
    rewards = names([arm], partial(of_each_reward, statistic="energy"))
    lines, ends = [], []
    for name, look in zip(rewards, cycle(REWARD_LOOKS)):
        read = one_of(partial(_shares, rewards=rewards), name)
        each, smooth = over_runs(arm, read), over_runs(arm, read, SMOOTHED_STEPS)
        if each is None or smooth is None:
            continue
        alone = each.runs == 1
        lines.append(
            Line(name, smooth.steps, smooth.mean, behind=each.mean if alone else (), look=look)
        )
        has_band = each.runs >= FEWEST_FOR_BAND
        spread = f" ({each.low[-1]:.2f} to {each.high[-1]:.2f})" if has_band else ""
        ends.append(f"{name} {each.median[0]:.2f} to {each.median[-1]:.2f}{spread}")
    if not lines:
        return None
    title = f"{arm.name}: energy of each reward, {SMOOTHED}"
    xlabel = STEP + (" (thin lines: not smoothed)" if lines[0].behind else "")
    panel = Panel(title, xlabel, "share of squared contributions", lines, (0, 1), stacked=True)
    what = "Energy" if lines[0].behind else "Median energy (and, of five runs, its quartiles)"
    caption = f"{what} at the first to the last step, not smoothed: {', '.join(ends)}."
    return Chart(f"influence-energy-{arm.name}", panel, caption)


def _shares(metrics: Metrics, rewards: Sequence[str]) -> dict[str, Curve]:
    """{reward: {step: share}}: 0 where a step does not log the reward, NaN for all if for one."""
    logged = of_each_reward(metrics, "energy")
    steps = sorted(set().union(*logged.values()))
    at = {step: {name: logged.get(name, {}).get(step, 0.0) for name in rewards} for step in steps}
    gaps = {step for step, shares in at.items() if any(map(math.isnan, shares.values()))}
    return {
        name: {step: math.nan if step in gaps else shares[name] for step, shares in at.items()}
        for name in rewards
    }


def _correlation_chart(arm: RunsOfArm) -> Chart | None:
    lines = _of_each(arm, "correlation")
    if not lines:
        return None
    title = f"{arm.name}: correlation of each reward with the advantage"
    panel = Panel(title, STEP, "correlation", lines, (-1.05, 1.05))
    caption = f"Correlation at the last step: {last(lines)}."
    return Chart(f"influence-correlation-{arm.name}", panel, caption)


def _of_each(arm: RunsOfArm, statistic: str) -> list[Line]:
    """A line for each reward."""
    read_each = partial(of_each_reward, statistic=statistic)
    reads = {name: one_of(read_each, name) for name in names([arm], read_each)}
    return _lines_of(arm, reads, REWARD_LOOKS)


def _lines_of(arm: RunsOfArm, reads: Mapping[str, Read], looks: Sequence[int]) -> list[Line]:
    """Several quantities of one arm."""
    return [
        drawn
        for number, (name, read) in enumerate(reads.items())
        for drawn in lines_of(arm, read, name, looks[number % len(looks)])
    ]
