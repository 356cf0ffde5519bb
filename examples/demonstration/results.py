"""What the arms got of each reward, and what they answer, from the folders of their runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from verl_gdpo.terminal import printable, render
from verl_gdpo.tools.run_folder.dump_reader import dump_files, read_dump
from verl_gdpo.tools.run_folder.folder import read_metrics, training_rewards
from workshop.experiments import demonstration as ours
from workshop.experiments.demonstration import LAST

SHOWN_PROMPTS = 4

Row = Mapping[str, Any]
Runs = Mapping[str, Path]  # {arm: the folder of its run}
Curves = Mapping[str, Mapping[str, Mapping[int, float]]]  # {arm: {reward: {step: mean}}}
Samples = Mapping[str, list[Row]]  # {prompt: its samples in one step}


def rewards_table(runs: Runs) -> str:
    """Return the mean of each reward in the first step, and of each arm over the last five."""
    curves = _curves(runs)
    ends = _ends(curves)
    first = next(iter(curves.values()))  # all arms have the same policy at first
    rows = []
    for reward, of_first in first.items():
        start = next(iter(of_first.values()))
        means = [start, *(end[reward] for end in ends.values())]
        rows.append([reward, *(f"{mean:.3g}" for mean in means)])
    return render(["reward", "step 1", *(f"{arm}, last {LAST}" for arm in runs)], rows)


def place_among_ours(runs: Runs, setting: str) -> str:
    """Return in how many runs of ours GDPO gained as much over GRPO, for each reward.

    It is "" where one of the two was not trained, or where we have no runs of the setting.
    """
    if not {"grpo", "gdpo"} <= runs.keys():
        return ""
    ends = _ends(_curves(runs))
    rows = []
    for reward in ends["gdpo"]:
        if (setting, "gdpo", reward) not in ours.curves():
            return ""
        gain = ends["gdpo"][reward] - ends["grpo"][reward]
        of_ours = ours.difference(setting, reward).values
        as_large = sum(theirs >= gain for theirs in of_ours)
        middle = f"{median(of_ours):+.3g}"
        rows.append([reward, f"{gain:+.3g}", middle, f"{as_large} of {len(of_ours)}"])
    header = ["gdpo minus grpo", "here", "median of our runs", "ours that are as large or larger"]
    return render(header, rows)


def answers(runs: Runs, reward: str) -> str:
    """Return answers of all arms to some prompts of the last steps, and how these were chosen.

    They are the prompts in the middle: for them, the difference of `reward` between the second arm
    and the first one is nearest to its median over the prompts of the last five steps. The first
    sample is shown.
    """
    lasts = {arm: _samples(dump_files(run)[0][-LAST:]) for arm, run in runs.items()}
    shared = set.intersection(*(set(of_arm) for of_arm in lasts.values()))
    first, *others = lasts.values()
    second = others[0] if others else first
    gains = {
        prompt: _mean(second[prompt], reward) - _mean(first[prompt], reward) for prompt in shared
    }
    middle = median(gains.values())
    nearest = sorted(gains, key=lambda prompt: (abs(gains[prompt] - middle), prompt))
    names = " and ".join(list(runs)[:2])
    lines = [f"Prompts of the last {LAST} steps, and the first sample of each:"]
    if others:
        lines = [
            f"Prompts of the last {LAST} steps whose difference of {reward} between {names} is "
            "nearest to the median, and the first sample of each:"
        ]
    starts = _samples(dump_files(next(iter(runs.values())))[0][:1])  # all arms have the same
    for prompt in nearest[:SHOWN_PROMPTS]:
        lines += ["", asked(prompt)]
        if prompt in starts:
            lines.append(_line("start", starts[prompt][0]))
        lines += [_line(arm, of_arm[prompt][0]) for arm, of_arm in lasts.items()]
    return "\n".join(lines)


def asked(prompt: str) -> str:
    """Return what the user says in a decoded prompt of one message."""
    return printable(prompt.rpartition("user\n")[2].rpartition("\nassistant")[0] or prompt)


def _curves(runs: Runs) -> Curves:
    return {arm: training_rewards(read_metrics(run)) for arm, run in runs.items()}


def _ends(curves: Curves) -> dict[str, dict[str, float]]:
    """Return {arm: {reward: its mean over the last steps}}."""
    return {
        arm: {reward: fmean([*steps.values()][-LAST:]) for reward, steps in of_arm.items()}
        for arm, of_arm in curves.items()
    }


def _samples(files: Sequence[Path]) -> Samples:
    """Return the samples of each prompt in the last of these steps that had it."""
    samples: dict[str, list[Row]] = {}
    for file in files:
        of_step: dict[str, list[Row]] = {}
        for row in read_dump(file):
            of_step.setdefault(row["input"], []).append(row)
        samples |= of_step
    return {
        prompt: sorted(rows, key=lambda row: row["session"]) for prompt, rows in samples.items()
    }


def _mean(rows: Sequence[Row], reward: str) -> float:
    return fmean(row["rewards"][reward] for row in rows)


def _line(who: str, row: Row) -> str:
    rewards = ", ".join(f"{name} {value:.3g}" for name, value in row["rewards"].items())
    when = f"{who}, step {row['step']}"
    return f"  {when:<23}  {printable(row['output'])}   ({rewards})"
