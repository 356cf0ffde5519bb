"""What is left of the rewards in the advantage: influence, saturation and collapse."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from verl_gdpo.run.folder import curve, of_each_reward
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.charts import STEP
from verl_gdpo.tools.report.runs import RunsOfArm
from verl_gdpo.tools.report.sections import (
    SMOOTHED,
    SMOOTHED_STEPS,
    Chart,
    Read,
    Section,
    absent,
    arm_lines,
    correlation_limits,
    decimal,
    first_to_last,
    last,
    lines_of,
    listed,
    names,
    of_each_arm,
    one_of,
    recent,
)

# the first are unlike those of two arms
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
NOT_LOGGED = "not known, because the metrics hold no gdpo/<reward>/{}"
WRITTEN_BY = "verl-gdpo 0.1.0 writes them with the estimators gdpo and grpo"


def collapse(arms: Sequence[RunsOfArm]) -> Section:
    charts = []
    for key, (title, ylabel) in SHARES.items():
        if lines := arm_lines(arms, partial(curve, key=key)):
            panel = Panel(title, STEP, ylabel, lines, is_share=True)
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
    panel = Panel(f"{arm.name}: {what}", STEP, ylabel, lines, is_share=is_share)
    caption = f"{what.capitalize()} at the last step: {last(lines, digits=3 * is_share)}."
    return Chart(f"{what.split()[0]}-{arm.name}", panel, caption)


def influence(arms: Sequence[RunsOfArm]) -> Section:
    of_arm = (share_chart, _energy_chart, _correlation_chart)
    found = [make(arm) for make in of_arm for arm in arms]
    return Section(
        "influence",
        "Which reward drives the update?",
        "Share: how much of the advantage comes from each reward, which is the covariance of its "
        "contribution with the sum of all, over the variance of that sum. The shares add up to 1; "
        "one below 0 pulls against the others. Energy: its share of the squared contributions, of "
        "which rewards that cancel have much. Correlation: whether a reward pulls with the "
        "advantage (1), against it (-1), or neither (0).",
        [chart for chart in found if chart is not None],
        absent(arms, READ_INFLUENCE, WRITTEN_BY),
        answer=of_each_arm(arms, _shares_in_words, NOT_LOGGED.format("share")),
    )


def _shares_in_words(arm: RunsOfArm) -> str:
    """`of the advantage, correctness 0.72, format 0.28`, the largest first."""
    shares = recent_of_each(arm, "share")
    names = sorted(shares, key=lambda name: -abs(shares[name]))
    said = listed([f"{name} {decimal(shares[name])}" for name in names])
    return f"of the advantage, {said}" if said else ""


def saturation(arms: Sequence[RunsOfArm]) -> Section:
    charts = [
        _chart_of_each(arm, "varies", "groups in which a reward differs", "share of groups")
        for arm in arms
    ]
    return Section(
        "saturation",
        "Is a reward dead or saturated?",
        "A reward trains only in the groups in which it differs between rollouts. Where it differs "
        "in none it is reached everywhere, reached nowhere, or constant: the shares of samples at "
        "its highest and lowest possible value tell which, where these are declared.",
        [chart for chart in charts if chart is not None],
        absent(
            arms,
            {"gdpo/<reward>/varies": partial(of_each_reward, statistic="varies")},
            WRITTEN_BY,
        ),
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


def share_chart(arm: RunsOfArm) -> Chart | None:
    """None where no run has the metrics."""
    what = "share of each reward in the advantage"
    return _chart_of_each(arm, "share", what, "share of the advantage")


def _energy_chart(arm: RunsOfArm) -> Chart | None:
    return _chart_of_each(arm, "energy", "energy of each reward", "share of the squares")


def _correlation_chart(arm: RunsOfArm) -> Chart | None:
    what = "correlation of each reward with the advantage"
    return _chart_of_each(arm, "correlation", what, "correlation", is_share=False)


def _chart_of_each(
    arm: RunsOfArm,
    statistic: str,
    what: str,
    ylabel: str,
    is_share: bool = True,
) -> Chart | None:
    """A smoothed line for each reward: its share of something, or a correlation."""
    read_each = partial(of_each_reward, statistic=statistic)
    reads = {name: one_of(read_each, name) for name in names([arm], read_each)}
    lines = _lines_of(arm, reads, REWARD_LOOKS, SMOOTHED_STEPS)
    if not lines:
        return None
    title = f"{arm.name}: {what}, {SMOOTHED}"
    ylim = None if is_share else correlation_limits(lines)
    panel = Panel(title, STEP, ylabel, lines, ylim, is_share=is_share)
    caption = f"First step to the {SMOOTHED} at the end: {first_to_last(panel)}."
    return Chart(f"{statistic}-{arm.name}", panel, caption)


def _lines_of(
    arm: RunsOfArm, reads: Mapping[str, Read], looks: Sequence[int], smooth: int = 1
) -> list[Line]:
    """Several quantities of one arm; when the looks are used up they come again with a change."""
    found = []
    for number, (name, read) in enumerate(reads.items()):
        again, which = divmod(number, len(looks))
        look = looks[which] + again * len(REWARD_LOOKS)
        found += lines_of(arm, read, name, look, smooth)
    return found
