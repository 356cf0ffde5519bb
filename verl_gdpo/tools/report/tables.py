"""The tables of the page: results, and what the page is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from verl_gdpo.run.dump_reader import DUMPS_READ, dump_files, has_rewards
from verl_gdpo.run.folder import Metrics, of_each_reward, training_rewards, validation_rewards
from verl_gdpo.run.outline import ENDS, NOTHING, STARTS, End, ends, history
from verl_gdpo.run.scorer import HOW
from verl_gdpo.tools.report.health import named_rewards
from verl_gdpo.tools.report.runs import (
    FEWEST_FOR_BAND,
    Run,
    RunsOfArm,
    compared,
    differing,
    ends_apart,
    last_common_step,
    names,
)

# what each input makes possible, and how to have it
OF_METRICS = "curves"
OF_NAMES = "curve of each reward, and findings about each"
OF_SHARES = "which reward drives the update, which is dead"
OF_CONFIG = "model, data, seeds, and weights of the rewards"
RUNS_CAPTION = "Runs: the prompts of a step, the rollouts of a prompt, and data.seed"
MANAGER = "train with reward.reward_manager.name=gdpo, which works with grpo too"
SHARES = "train with the estimator gdpo or grpo of verl-gdpo"
TESTS = "train with trainer.test_freq=STEPS and trainer.val_before_train=True"
CONFIG = "name it with --config; Hydra writes outputs/DATE/TIME/.hydra/config.yaml"
DUMPS = "train with trainer.rollout_data_dir=FOLDER, and name the folder with --rollouts"


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
    rewards = dict.fromkeys([*names(arms, training_rewards), *names(arms, validation_rewards)])
    last, rows = last_common_step(arms), []
    for name in rewards:
        for arm in arms:
            of_runs = [ends(_until(run.metrics, last), name) for run in arm.runs]
            cells = [_over_runs([e[what] for e in of_runs if what in e]) for what in ENDS]
            rows.append((name, arm.name, str(len(arm.runs)), *cells))
    caption = f"Mean reward{ends_apart(arms)}; higher is better"
    if any(len(arm.runs) >= FEWEST_FOR_BAND for arm in arms):
        caption += "; of five runs and more the median and, in brackets, the inter-quartile range"
    return Table(caption, ("reward", "arm", "runs", *ENDS), rows, labels=2)


def _until(metrics: Metrics, last: int) -> Metrics:
    return {step: values for step, values in metrics.items() if step <= last}


def _over_runs(found: Sequence[End]) -> str:
    """Each of a few runs, and the quartiles of more."""
    if len(found) < FEWEST_FOR_BAND:
        return ", ".join(map(str, found)) or NOTHING
    low, median, high = np.quantile([end.value for end in found], [0.25, 0.5, 0.75])
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def runs(arms: Sequence[RunsOfArm]) -> Table:
    """What was run: one row a run folder."""
    header = ("arm", "run", "model", "data", "verl", "seed", "steps", "prompts", "rollouts")
    rows = [
        (
            arm.name,
            run.name,
            _short_path(run.setting("actor_rollout_ref.model.path")),
            _short_path(run.setting("data.train_files")),
            _text(run.versions.get("verl")),
            _text(run.setting("data.seed")),
            str(run.last_step),
            _text(run.setting("data.train_batch_size")),
            _text(run.setting("actor_rollout_ref.rollout.n")),
        )
        for arm in arms
        for run in arm.runs
    ]
    return Table(RUNS_CAPTION, header, rows, 5)


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
        for (name, _), one in zip(members, settings, strict=True):
            values[name][one.get(key, "not there")] = None
        rows.append((key, *map(", ".join, values.values())))
    header, caption = ("key", *(arm.name for arm in arms)), "Where the configurations differ"
    return Table(caption, header, rows, labels=len(header)) if rows else None


def starts(arms: Sequence[RunsOfArm]) -> Table | None:
    """When each start of a run began and ended; None where no run was started twice."""
    of_runs = {run.name: history(run.folder) for arm in arms for run in arm.runs}
    if all(len(rows) < 2 for rows in of_runs.values()):
        return None
    rows = [(name, *row) for name, found in of_runs.items() for row in found]
    return Table("The starts of each run", ("run", *STARTS), rows, 1 + len(STARTS), wraps=True)


def _text(value: object) -> str:
    return NOTHING if value is None else str(value)


def _short_path(value: object) -> str:
    """The last two parts of a path or of a model's name, or of the first of several."""
    if value is None:
        return NOTHING
    first = value if isinstance(value, str) else next(iter(value))  # type: ignore[call-overload]
    return "/".join(Path(str(first)).parts[-2:])


@dataclass(frozen=True)
class Input:
    """One thing that a report is made of."""

    name: str
    found: str
    gives: str
    need: str = ""  # how to have it; "" where it is there

    @property
    def use(self) -> str:
        return f"no {self.gives}: {self.need}" if self.need else self.gives

    def __str__(self) -> str:
        return f"{self.name}: {self.found} -> {self.use}"


def inputs(arms: Sequence[RunsOfArm]) -> Table:
    """The inputs of every run, as a table."""
    runs = [run for arm in arms for run in arm.runs]
    rows = [[run.name, one.name, one.found, one.use] for run in runs for one in inputs_of(run)]
    header = ["run", "input", "found", "what it makes possible, or how to have it"]
    if len(runs) == 1:
        rows, header = [row[1:] for row in rows], header[1:]
    return Table("What was found", header, rows, labels=len(header), wraps=True)


def inputs_of(run: Run) -> list[Input]:
    """What was found of a run, and what was not."""
    listed = ", ".join(named_rewards(run))
    rest = {
        ("shares of rewards", OF_SHARES, SHARES): bool(of_each_reward(run.metrics, "share")),
        ("validation", "its curve", TESTS): bool(validation_rewards(run.metrics)),
        ("configuration", OF_CONFIG, CONFIG): run.config is not None,
    }
    return [
        Input("metrics", f"{len(run.metrics)} steps, from {run.tracker}", OF_METRICS),
        Input("rewards by name", listed or "their sum alone", OF_NAMES, "" if listed else MANAGER),
        *(
            Input(name, "yes" if is_there else "no", gives, "" if is_there else need)
            for (name, gives, need), is_there in rest.items()
        ),
        *_of_rollouts(run),
    ]


def _of_rollouts(run: Run) -> list[Input]:
    try:
        files = dump_files(run.rollouts)[0] if run.rollouts else []
    except ValueError:
        files = []
    if not files:
        named = run.setting("trainer.rollout_data_dir")
        found = f"no, {named} of the configuration is not here" if named else "no"
        return [Input("rollouts", found, "examples, and no replay", DUMPS)]
    read = f", {DUMPS_READ} of which are read" if len(files) > DUMPS_READ else ""
    dumps = Input("rollouts", f"{len(files)} steps in {run.rollouts}{read}", "examples, and replay")
    if has_rewards(files[-1]):
        return [dumps]
    scored, need = "alone", f"--scorer scores them again; {HOW}"
    if run.scorer is not None:
        scored, need = f"scored again by {run.scorer.name}", ""
    return [dumps, Input("rewards of each rollout", f"their sum, {scored}", "examples", need)]
