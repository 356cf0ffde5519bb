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
REWARDS = {"format": ".2f", "judge": ".1f"}  # {reward: the form of a mean}

Runs = Mapping[str, Path]  # {arm: the folder of its run}


def rewards_table(runs: Runs) -> str:
    """Return the mean of each reward and arm in the first step, and over the last five."""
    header = ["arm", *(f"{r}, {when}" for r in REWARDS for when in ("step 1", f"last {LAST}"))]
    rows = []
    for arm, run in runs.items():
        curves, cells = training_rewards(read_metrics(run)), [arm]
        for reward, form in REWARDS.items():
            means = [*curves[reward].values()]
            cells += [f"{end:{form}}" for end in (means[0], fmean(means[-LAST:]))]
        rows.append(cells)
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
    return render(["lives in the", "judge wants", "", "answer", *REWARDS], rows, left=(0, 1, 2, 3))


def _first_answers(run: Path) -> list[dict[str, dict[str, Any]]]:
    """Return {prompt: the row of its first sample} of the first and of the last step."""
    files, _ = dump_files(run)
    steps = [read_dump(file) for file in (files[0], files[-1])]
    return [{row["input"]: row for row in rows if row["session"] == 0} for rows in steps]


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [row["output"], *(f"{row['rewards'][reward]:.0f}" for reward in REWARDS)]
