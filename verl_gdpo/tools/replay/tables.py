"""The tables of a replay: steps, correlations with the rewards, and the most different groups."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from verl_gdpo.algorithm.zero import SAME_STD
from verl_gdpo.terminal import printable, render, shorten, width_of
from verl_gdpo.tools.replay.comparison import Group, Replay, StepReport

MIN_RESPONSE = 24  # a response gets at least this many columns
LINES = 12  # a table over steps has at most this many lines; a line may join several steps
LEGEND = f"""\
a | b          a is for the advantages that are compared with, b for the alternative
correlation    between the two advantages of each rollout
distance       mean |difference| after each is divided by its std, because scales differ;
               groups that are silent in both do not count in the std
silent groups  share of groups in which every advantage is 0
tied pairs     share of pairs in a group with different rewards, but the same advantage
std            standard deviation of a step's advantages
correlation with a reward: with the reward minus its mean in the group
Advantages count as the same if they differ by less than {SAME_STD:g} of their step's std, and
as 0 if they are smaller than that.
A line for several steps holds means over the steps, weighted by their rollouts."""


def comparison_tables(replay: Replay, name: str, width: int) -> str:
    """Return all tables for one alternative."""
    parts = [step_table(replay.steps, name), reward_table(replay.steps, name)]
    groups = replay.most_different.get(name, [])
    if groups:
        parts.append(f"Where {replay.reference} and {name} differ most:")
        parts += [group_table(group, width) for group in groups]
    return "\n\n".join(parts)


def group_table(group: Group, width: int) -> str:
    """Return a table of a group's rewards, advantages and beginnings of responses."""
    names = list(dict.fromkeys(name for row in group.rows for name in row["rewards"]))
    header = ["#", *names, *group.advantages, "response"]
    rows = []
    for i, row in enumerate(group.rows):
        rewards = [_value(row["rewards"].get(name)) for name in names]
        # + 0.0 makes -0.0 positive
        advantages = [f"{round(of[i], 3) + 0.0:.3f}" for of in group.advantages.values()]
        rows.append([str(i), *rewards, *advantages, ""])
    left = width - width_of(render(header, rows).splitlines()[1]) + len("response")
    for row, line in zip(group.rows, rows, strict=True):
        line[-1] = shorten(str(row.get("output", "")), max(left, MIN_RESPONSE))
    distances = ", ".join(f"{name} {value:.2f}" for name, value in group.distance.items())
    reference = next(iter(group.advantages))
    title = f"step {group.step}, group {printable(group.id)}; "
    title += f"distance from {reference}: {distances}"
    return f"{title}\n{render(header, rows, left=(len(header) - 1,))}"


def _value(value: object) -> str:
    if isinstance(value, int | float):
        return f"{value:.3g}"
    return "-" if value is None else str(value)


def step_table(steps: Sequence[StepReport], name: str) -> str:
    """Return a table of `name` against the reference; the last line is for all steps."""
    header = ["step", "rollouts", "correlation", "distance", "silent groups", "tied pairs", "std"]
    parts = np.array_split(np.arange(len(steps)), min(len(steps), LINES))
    chunks = [[steps[i] for i in part] for part in parts]
    rows = [_step_row(chunk, name) for chunk in chunks]
    if len(steps) > 1:
        rows.append(["all", *_step_row(steps, name)[1:]])
    return render(header, rows)


def reward_table(steps: Sequence[StepReport], name: str) -> str:
    """Return a table with the correlation of each advantage with each reward."""
    reference = next(iter(steps[0].columns))
    columns = {key: [step.columns[key] for step in steps] for key in (reference, name)}
    sizes = [len(step.columns[name].A_B) for step in steps]
    rewards = dict.fromkeys(r for side in columns.values() for c in side for r in c.follows)
    rows = []
    for reward in rewards:
        sides = ([c.follows.get(reward) for c in side] for side in columns.values())
        rows.append([reward, *(_mean(side, sizes, "{:.3f}".format) for side in sides)])
    return render(["correlation with", *columns], rows)


def _step_row(steps: Sequence[StepReport], name: str) -> list[str]:
    """Return a table row with the means over the steps, weighted by their rollouts."""
    pairs = [(next(iter(step.columns.values())), step.columns[name]) for step in steps]
    sizes = [len(reference.A_B) for reference, _ in pairs]

    def both(attribute: str, show: Callable[[float], str]) -> str:
        sides = ([getattr(pair[i], attribute) for pair in pairs] for i in (0, 1))
        return " | ".join(_mean(values, sizes, show) for values in sides)

    return [
        "-".join(map(str, sorted({steps[0].number, steps[-1].number}))),
        f"{sum(sizes):,}",
        _mean([a.correlation(b) for a, b in pairs], sizes, "{:.3f}".format),
        _mean([float(a.distance_B(b).mean()) for a, b in pairs], sizes, "{:.3f}".format),
        both("silent_groups", "{:.1%}".format),
        both("ties", "{:.1%}".format),
        both("std", "{:.2f}".format),
    ]


def _mean(
    values: Iterable[float | None], sizes: Sequence[int], show: Callable[[float], str]
) -> str:
    """Return the mean of the values that are not None, weighted by their sizes."""
    there = [(v, n) for v, n in zip(values, sizes, strict=True) if v is not None]
    return show(sum(v * n for v, n in there) / sum(n for _, n in there)) if there else "-"
