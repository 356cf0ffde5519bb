"""What the arms earned, and what they answer, from the folders of their runs."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_gdpo.run.dump_reader import dump_files, read_dump
from verl_gdpo.run.folder import read_metrics, training_rewards
from verl_gdpo.terminal import render

LAST = 5  # steps, whose mean is the end of a training
SHOWN_PROMPTS = 4

Runs = Mapping[str, Path]  # {arm: the folder of its run}


def rewards_table(runs: Runs) -> str:
    """Return the mean of each reward and arm in the first step, and over the last five."""
    curves = {arm: training_rewards(read_metrics(run)) for arm, run in runs.items()}
    rewards = [*next(iter(curves.values()))]
    header = ["arm", *(f"{r}, {when}" for r in rewards for when in ("step 1", f"last {LAST}"))]
    rows = []
    for arm, means_of in curves.items():
        means = [[*means_of[reward].values()] for reward in rewards]
        rows.append([arm, *(f"{end:.3g}" for m in means for end in (m[0], fmean(m[-LAST:])))])
    return render(header, rows)


def answers_table(runs: Runs) -> str:
    """Return an answer to the same prompts, before the training and after that of each arm."""
    answers = {arm: _first_answers(run) for arm, run in runs.items()}
    starts = next(iter(answers.values()))[0]  # the first step has the policy that all arms have
    rows = []
    for prompt, start in sorted(starts.items())[:SHOWN_PROMPTS]:
        place = prompt.rpartition(" the ")[2].partition("?")[0]
        rows.append([place, start["gts"], "before", *_cells(start)])
        rows += [["", "", arm, *_cells(ends[prompt])] for arm, (_, ends) in answers.items()]
    rewards = next(iter(starts.values()))["rewards"]
    return render(["lives in the", "wanted", "", "answer", *rewards], rows, left=(0, 1, 2, 3))


def _first_answers(run: Path) -> list[dict[str, dict[str, Any]]]:
    """Return {prompt: the row of its first sample} of the first and of the last step."""
    files, _ = dump_files(run)
    steps = [read_dump(file) for file in (files[0], files[-1])]
    return [{row["input"]: row for row in rows if row["session"] == 0} for rows in steps]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [row["output"], *(f"{reward:.3g}" for reward in row["rewards"].values())]
