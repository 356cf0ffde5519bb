"""The tables of the page: results, and what the page is made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_gdpo.run.dump_reader import DUMPS_READ, dump_files, has_rewards
from verl_gdpo.run.folder import Metrics, of_each_reward
from verl_gdpo.run.scorer import HOW
from verl_gdpo.run.start_table import ENDS, NOTHING, STARTS, EndValue, ends, history
from verl_gdpo.tools.report.arms import (
    FEWEST_FOR_BAND,
    RunsOfArm,
    compared,
    differing,
    ends_apart,
    last_common_step,
    names,
)
from verl_gdpo.tools.report.health import named_rewards
from verl_gdpo.tools.report.runs import TESTED, TRAINED, Run

OF_RUNS = {
    "seed": "data.seed",
    "prompts": "data.train_batch_size",
    "rollouts": "actor_rollout_ref.rollout.n",
    "model": "actor_rollout_ref.model.path",
    "data": "data.train_files",
}
# what each thing that may be found of a run makes possible, and how to have it
INPUTS = {
    "metrics": ("curves", ""),
    "rewards by name": (
        "curve of each reward, and findings about each",
        "train with reward.reward_manager.name=gdpo, which works with grpo too",
    ),
    "shares of rewards": (
        "which reward drives the update, which is dead",
        "train with the estimator gdpo or grpo of verl-gdpo",
    ),
    "validation": (
        "its curve",
        "train with trainer.test_freq=STEPS and trainer.val_before_train=True",
    ),
    "configuration": (
        "model, data, seeds, and weights of the rewards",
        "name it with --config; Hydra writes outputs/DATE/TIME/.hydra/config.yaml",
    ),
    "rollouts": (
        "examples, what GDPO would change, and replay",
        "train with trainer.rollout_data_dir=FOLDER, and name the folder with --rollouts",
    ),
    "rewards of each rollout": ("examples", f"--scorer scores them again; {HOW}"),
}


@dataclass(frozen=True)
class Table:
    """Cells are text; the first `labels` columns are words, the others numbers.

    wraps: the cells are sentences, which may have several lines.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int
    wraps: bool = False


def results(arms: Sequence[RunsOfArm]) -> Table:
    """Each reward of each arm, at both ends of the training."""
    last = last_common_step(arms)
    of_arms = [(arm, [ends(_until(run.metrics, last)) for run in arm.runs]) for arm in arms]
    rows = [
        (name, arm.name, str(len(arm.runs)), *_cells([of_run.get(name, {}) for of_run in of_runs]))
        for name in dict.fromkeys([*names(arms, TRAINED), *names(arms, TESTED)])
        for arm, of_runs in of_arms
    ]
    caption = f"Mean reward{ends_apart(arms)}; higher is better"
    if any(len(arm.runs) >= FEWEST_FOR_BAND for arm in arms):
        caption += "; of five runs and more the median and, in brackets, the inter-quartile range"
    return Table(caption, ("reward", "arm", "runs", *ENDS), rows, labels=2)


def _until(metrics: Metrics, last: int) -> Metrics:
    return {step: values for step, values in metrics.items() if step <= last}


def _cells(of_runs: Sequence[Mapping[str, EndValue]]) -> list[str]:
    return [_over_runs([rewards[end] for rewards in of_runs if end in rewards]) for end in ENDS]


def _over_runs(values: Sequence[EndValue]) -> str:
    """Each of a few runs, and the quartiles of more."""
    if len(values) < FEWEST_FOR_BAND:
        return ", ".join(map(str, values)) or NOTHING
    low, median, high = np.quantile([end.value for end in values], [0.25, 0.5, 0.75])
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def runs(arms: Sequence[RunsOfArm]) -> Table:
    """What was run: one row a run folder."""
    rows = [
        (
            *(arm.name, run.name, run.versions.get("verl", NOTHING), str(run.last_step)),
            *(_short(run.setting(key)) for key in OF_RUNS.values()),
        )
        for arm in arms
        for run in arm.runs
    ]
    caption = "Runs: the prompts of a step, the rollouts of a prompt, and data.seed"
    return Table(caption, ("arm", "run", "verl", "steps", *OF_RUNS), rows, 2)


def differences(arms: Sequence[RunsOfArm]) -> Table | None:
    """Keys of the configuration in which runs differ; None for a single run, or without any.

    Seeds, names, folders and ports are no difference: the table of runs has the seeds.
    `compared` says what is compared of each run.
    """
    members = [(arm.name, run) for arm in arms for run in arm.runs if run.config]
    settings = compared([run for _, run in members])
    rows = []
    for key in differing(settings):
        values: dict[str, dict[str, None]] = {arm.name: {} for arm in arms}
        for (name, _), setting in zip(members, settings, strict=True):
            values[name][setting.get(key, "not there")] = None
        rows.append((key, *map(", ".join, values.values())))
    header, caption = ("key", *(arm.name for arm in arms)), "Where the configurations differ"
    return Table(caption, header, rows, labels=len(header)) if rows else None


def starts(arms: Sequence[RunsOfArm]) -> Table | None:
    """When each start of a run began and ended; None where no run was started twice."""
    of_runs = {run.name: history(run.folder) for arm in arms for run in arm.runs}
    if all(len(rows) < 2 for rows in of_runs.values()):
        return None
    rows = [(name, *row) for name, run_starts in of_runs.items() for row in run_starts]
    return Table("The starts of each run", ("run", *STARTS), rows, 1 + len(STARTS), wraps=True)


def _short(value: object) -> str:
    """A value, the last two parts of a path or of a model's name, or of the first of several."""
    if value is None:
        return NOTHING
    first = (
        next(iter(value)) if isinstance(value, Iterable) and not isinstance(value, str) else value
    )
    return "/".join(Path(str(first)).parts[-2:])


def inputs(arms: Sequence[RunsOfArm]) -> Table:
    """The inputs of every run, as a table."""
    runs = [run for arm in arms for run in arm.runs]
    rows = [(run.name, *row) for run in runs for row in inputs_of(run)]
    header = ("run", "input", "found", "what it makes possible, or how to have it")
    return Table("What was found", header, rows, labels=len(header), wraps=True)


def inputs_of(run: Run) -> list[tuple[str, str, str]]:
    """(input, what was found, what it makes possible or how to have it) of a run."""
    answers = {
        "metrics": f"{len(run.metrics)} steps, from {run.tracker}",
        "rewards by name": ", ".join(named_rewards(run)),
        "shares of rewards": "yes" if of_each_reward(run.curves, "share") else "",
        "validation": "yes" if run.tested else "",
        "configuration": "" if run.config is None else "yes",
        **_of_rollouts(run),
    }
    return [
        (name, what or "no", INPUTS[name][0] if what else f"no {': '.join(INPUTS[name])}")
        for name, what in answers.items()
    ]


def _of_rollouts(run: Run) -> dict[str, str]:
    try:
        files = dump_files(run.rollouts)[0] if run.rollouts else []
    except ValueError:
        files = []
    if not files:
        return {"rollouts": ""}
    read = f", {DUMPS_READ} of which are read" if len(files) > DUMPS_READ else ""
    answers = {"rollouts": f"{len(files)} steps in {run.rollouts}{read}"}
    if not has_rewards(files[-1]):
        by = f"their sum, scored again by {run.scorer.name}" if run.scorer else ""
        answers["rewards of each rollout"] = by
    return answers
