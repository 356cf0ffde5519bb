"""What the arms got of each reward, and what they answer, from the folders of their runs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_gdpo.terminal import printable, render
from verl_gdpo.tools.run_folder.dump_reader import dump_files, read_dump
from verl_gdpo.tools.run_folder.folder import read_metrics, training_rewards

LAST = 5  # steps, whose mean is the end of a training
SHOWN_PROMPTS = 4

Row = Mapping[str, Any]
Runs = Mapping[str, Path]  # {arm: the folder of its run}


def rewards_table(runs: Runs) -> str:
    """Return the mean of each reward in the first step, and of each arm over the last five."""
    curves = {arm: training_rewards(read_metrics(run)) for arm, run in runs.items()}
    first = next(iter(curves.values()))  # all arms have the same policy at first
    rows = []
    for reward, of_first in first.items():
        ends = (fmean([*of[reward].values()][-LAST:]) for of in curves.values())
        rows.append([reward, *(f"{mean:.3g}" for mean in (next(iter(of_first.values())), *ends))])
    return render(["reward", "step 1", *(f"{arm}, last {LAST}" for arm in curves)], rows)


def answers(runs: Runs) -> str:
    """Return answers to the same prompts, in the first step and when each arm saw them last."""
    steps = {arm: [read_dump(file) for file in dump_files(run)[0]] for arm, run in runs.items()}
    first = next(iter(steps.values()))
    starts = _first_samples(first[0])
    latest = sorted(starts, key=lambda prompt: (-_last(prompt, first)["step"], prompt))
    lines = []
    for prompt in latest[:SHOWN_PROMPTS]:
        ends = {arm: _last(prompt, of) for arm, of in steps.items()}
        rows = {"start": starts[prompt], **ends}
        lines += ["", asked(prompt), *(_line(who, row) for who, row in rows.items())]
    return "\n".join(lines[1:])


def asked(prompt: str) -> str:
    """Return what the user says in a decoded prompt of one message."""
    return printable(prompt.rpartition("user\n")[2].rpartition("\nassistant")[0] or prompt)


def _first_samples(rows: Iterable[Row]) -> dict[str, Row]:
    return {row["input"]: row for row in rows if row["session"] == 0}


def _last(prompt: str, steps: Sequence[Sequence[Row]]) -> Row:
    return next(found for rows in reversed(steps) if (found := _first_samples(rows).get(prompt)))


def _line(who: str, row: Row) -> str:
    rewards = ", ".join(f"{name} {value:.3g}" for name, value in row["rewards"].items())
    when = f"{who}, step {row['step']}"
    return f"  {when:<21}  {printable(row['output'])}   ({rewards})"
