"""Writes and reads the files in a run's folder.

runs/2026-01-31_12-00-00/
  train.log          everything that verl printed
  metrics/1.jsonl    the metrics; one file per training, because verl's file logger empties its file
  rollouts/7.jsonl   the rollouts of step 7, with rewards and advantages
  validation/        the same for validation
  checkpoints/
  report/            the output of `verl-gdpo report`
  starts/2/          what the second start began with, and how it ended; see `starts.py`
  hydra/DATE_TIME/   what Hydra keeps of a start, in .hydra/
  hang.txt           the stacks of all processes, if the run logged no step for too long
  lock               the process id of the launcher, which locks this file

With these loggers in `trainer.logger`, there are also `tensorboard/` and `wandb/`.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_gdpo.terminal import note, short_number
from verl_gdpo.tools.run.checkpoints import STARTS, manifests_in
from verl_gdpo.tools.run.starts import COMPOSED
from verl_gdpo.tools.run_folder.yaml_files import read_text

OF_VALIDATION = "val-"  # begins the names of its metrics
# `val-aux/<data source>/<reward>/mean@<samples>`; verl uses val-core for a reward named acc
VALIDATION_KEY = re.compile(r"val-(?:aux|core)/(?P<source>.*)/(?P<reward>[^/]+)/mean@\d+")

# the sum of all rewards, as verl logs it in training and in validation; a run without verl-gdpo has
# no other reward in its metrics
SCORE = "score"
SCORE_KEY = "critic/score/mean"
SCORE_IN_VALIDATION = "reward"

# `gdpo/<reward>/mean/<data source>`, which a run on several data sources has. A name with a slash
# is of no reward: `gdpo/rollout/tool_seconds/mean` says what tools took.
TRAINING_KEY = re.compile(r"gdpo/(?P<reward>[^/]+)/mean/(?P<source>.+)")

RECIPES = "verl-gdpo"  # `recipes` of recipes/train.yaml
ENDS = ("first step", "last step", "validation before", "after")
NOTHING = "-"

METRICS = "metrics"  # the folder of the metrics files
# The variable that says where verl's file logger writes, and ours, which has the same value if we
# have set it. So a file that the user has named is told from one of ours.
LOGGER_FILE = "VERL_FILE_LOGGER_PATH"
LOGGER_ROOT = "VERL_FILE_LOGGER_ROOT"  # the same of verl, for a folder of files that it names
OUR_LOGGER_FILE = "VERL_GDPO_METRICS"

# What Python raises for a line that is no line of metrics, such as one of too many brackets.
UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)

Metrics = Mapping[int, Mapping[str, float]]
Curve = TypeVar("Curve", bound=Mapping[int, float])


def claim_metrics_file(run: Path) -> Path:
    """Make a new file for verl's file logger, which no other start of this run writes."""
    folder = run / METRICS
    folder.mkdir(parents=True, exist_ok=True)
    taken = [int(path.stem) for path in _metrics_files(folder)]
    number = max(taken, default=0)
    while True:
        number += 1
        path = folder / f"{number}.jsonl"
        # If the file exists, another start made it first.
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path


def name_metrics_file(run: Path) -> dict[str, str]:
    """Return the variables that let verl's file logger write into a new file of a run."""
    file = str(claim_metrics_file(run.resolve()))
    return {LOGGER_FILE: file, OUR_LOGGER_FILE: file}


def has_earlier_metrics() -> bool:
    """Return whether the file that we have given to verl's file logger has metrics already.

    They are of another training of the same command, such as a script: both get the variables of
    the launcher. A file that the user has named is none of ours.
    """
    given = os.environ.get(LOGGER_FILE)
    if given is None or given != os.environ.get(OUR_LOGGER_FILE):
        return False
    file = Path(given)
    return file.is_file() and file.stat().st_size > 0


def keep_earlier_metrics() -> None:
    """Name a new file if verl's file logger would empty one of ours."""
    if has_earlier_metrics():
        run = Path(os.environ[LOGGER_FILE]).parent.parent
        os.environ.update(name_metrics_file(run))


def newer_metrics_file(file: Path) -> Path | None:
    """Return the last of the metrics files that were made after this one; None if it is the last.

    Args:
        file: a metrics file. One that `claim_metrics_file` has not made has no newer one.
    """
    if not file.stem.isdecimal():
        return None
    last = file
    for path in _metrics_files(file.parent):
        if int(path.stem) > int(last.stem):
            last = path
    if last == file:
        return None
    return last


def of_recipes(config: Any) -> bool:
    """Return whether the configuration is of our recipes: others may have a `run_dir` too."""
    return bool(config.get("recipes") == RECIPES and config.get("run_dir"))


def write_into_run_dir(config: Any) -> None:
    """Make verl's loggers write into `run_dir` of our recipes.

    By default they write into the current folder. This function sets environment variables, unless
    the user has set them. Relies on verl 0.9 `verl.utils.tracking`, which reads them when
    training starts.
    """
    if not of_recipes(config):
        return
    run = Path(config.run_dir).resolve()
    run.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TENSORBOARD_DIR", f"{run}/tensorboard")
    os.environ.setdefault("WANDB_DIR", str(run))
    chosen = {LOGGER_FILE, LOGGER_ROOT} & os.environ.keys()
    if "file" in config.trainer.logger and not chosen:
        os.environ.update(name_metrics_file(run))


class _Place(NamedTuple):
    """Up to where a file is read."""

    offset: int = 0  # bytes
    lines: int = 0


class MetricsReader:
    """Reads the metrics of a run while it writes them; each call of `new` continues the last one.

    A file that became shorter is read from its beginning: verl's file logger empties its file at
    the start of a training.

    run: the folder of a run, or a single file of verl's file logger. It may get another name
        between two calls.
    problems: a message for each line that could not be read, with its file and number.
    """

    def __init__(self, run: Path) -> None:
        self.problems: list[str] = []
        self.run = run
        self._read: dict[str, _Place] = {}  # {name of a file: the end of what is read of it}

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, {name: value}) for each new line, in the order of the run's starts.

        A value that is not a finite number becomes NaN; verl writes it as null. A last line without
        its end is skipped until verl has written the end.
        """
        if self.run.is_file():
            files = [self.run]
        else:
            files = _metrics_files(self.run / METRICS)
        for path in files:
            place = self._read.get(path.name, _Place())
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < place.offset:
                    place = _Place()
                file.seek(place.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    place = _Place(place.offset + len(line), place.lines + 1)
                    # Who reads may stop at any line, and the next call begins behind it.
                    self._read[path.name] = place
                    try:
                        yield _step_of(line)
                    except UNREADABLE as error:
                        self.problems.append(f"{path}, line {place.lines} left out: {error!r}")


def read_metrics(run: Path) -> Metrics:
    """Return {step: {name: value}} over all starts of a run, as `merged` does.

    Lines that cannot be read are left out, with one warning.
    """
    reader = MetricsReader(run)
    metrics = merged(reader.new())
    problems = reader.problems
    if problems:
        note(f"WARNING: {len(problems)} lines of {run} left out; {problems[0]}")
    return metrics


def merged(rows: Iterable[tuple[int, Mapping[str, float]]]) -> Metrics:
    """Return the metrics of rows (step, values), by step; a later row wins.

    A start that goes on from a checkpoint gives up what earlier starts logged behind its first
    step, even if it has not got as far yet. A validation gives up nothing: a start may fail behind
    the one of its checkpoint, or be there for it alone.

    Args:
        rows: in the order in which the run logged them; only a new start goes back in steps.
    """
    steps: dict[int, dict[str, float]] = {}
    last_trained = 0
    for step, values in rows:
        if not is_validation(values):
            is_new_start = step < last_trained
            if is_new_start:
                steps = {kept: of_kept for kept, of_kept in steps.items() if kept <= step}
            last_trained = step
        steps.setdefault(step, {}).update(values)
    return dict(sorted(steps.items()))


def is_validation(values: Mapping[str, float]) -> bool:
    """Return whether a row is of a validation alone, as verl logs it before a start's first step.

    The row of a training step has the metrics of its validation too.
    """
    return all(name.startswith(OF_VALIDATION) for name in values)


def _metrics_files(folder: Path) -> list[Path]:
    """Return the metrics files in the order of the starts; other files are ignored."""
    files = []
    for path in folder.glob("*.jsonl"):
        if path.stem.isdecimal() and path.is_file():
            files.append(path)
    return sorted(files, key=lambda path: int(path.stem))


def _step_of(line: bytes) -> tuple[int, dict[str, float]]:
    """Return (step, {name: value}) of a line of verl's file logger."""
    record = json.loads(line)
    step = int(record["step"])
    values = {name: finite_or_nan(value) for name, value in record["data"].items()}
    return step, values


def finite_or_nan(value: Any) -> float:
    """Return a finite number as it is, and NaN for anything else."""
    if not isinstance(value, (int, float)):
        return math.nan
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        # A whole number may be larger than any float.
        return math.nan
    if not is_finite:
        return math.nan
    return value


def config_of_run(folder: Path) -> Path | None:
    """Return the file with a run's configuration, given its folder, its rollouts/ or a dump.

    It is the one of the last start.
    """
    if folder.is_file():
        folder = folder.parent
    runs = [folder]
    if folder.name == "rollouts":
        runs.append(folder.parent)
    for run in runs:
        file = _config_in(run)
        if file is not None:
            return file
    return None


def _config_in(run: Path) -> Path | None:
    """Return the file with the configuration of the last start in a run's folder."""
    recorded = manifests_in(run / STARTS)
    if recorded:
        return recorded[-1].with_name(COMPOSED)
    for place in ("hydra/*/", "hydra/", ""):
        files = sorted(run.glob(f"{place}.hydra/config.yaml"))
        if files:
            return files[-1]
    return None


def read_config(run: Path) -> Any:
    """Return a run's configuration as a DictConfig, or None if Hydra wrote none.

    Raises:
        ValueError: it cannot be read; the message names the file.
    """
    file = config_of_run(run)
    if file is None:
        return None
    return _loaded(file)


def _loaded(file: Path) -> Any:
    """Return the content of a YAML file; raise ValueError, with its path, where there is none."""
    try:
        return OmegaConf.create(read_text(file))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None


def load_config(path: Path) -> Any:
    """Return the configuration in a file, or in a folder that Hydra made, as a DictConfig.

    Raises:
        ValueError: there is none.
    """
    file: Path | None = path
    if path.is_dir():
        file = config_of_run(path)
    if file is not None:
        config = _loaded(file)
        if OmegaConf.is_dict(config) and OmegaConf.is_dict(OmegaConf.select(config, "algorithm")):
            return config
    raise ValueError(f"{path}: no `algorithm` block; expected .hydra/config.yaml of Hydra")


def curves(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Return {metric: {step: value}}."""
    by_metric: dict[str, dict[int, float]] = {}
    for step, values in metrics.items():
        for key, value in values.items():
            by_metric.setdefault(key, {})[step] = value
    return by_metric


def of_each_reward(all_curves: Mapping[str, Curve], statistic: str) -> dict[str, Curve]:
    """Return {reward: {step: value}} of the `curves` named `gdpo/<reward>/<statistic>`."""
    pattern = re.compile(rf"gdpo/([^/]+)/{statistic}")
    rewards = {}
    for key, curve in all_curves.items():
        match = pattern.fullmatch(key)
        if match:
            rewards[match[1]] = curve
    return rewards


def training_rewards(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Return {reward: {step: mean}}; with several data sources, the keys are "reward (source)".

    Metrics that name no reward have the reward `score`: the sum that verl logs.
    """
    all_curves = curves(metrics)
    rewards = {}
    for key, curve in all_curves.items():
        match = TRAINING_KEY.fullmatch(key)
        if match:
            rewards[f"{match['reward']} ({match['source']})"] = curve
    if not rewards:
        rewards = of_each_reward(all_curves, "mean")
    if not rewards and SCORE_KEY in all_curves:
        rewards[SCORE] = all_curves[SCORE_KEY]
    return rewards


def validation_rewards(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Return {reward: {step: mean}}; with several data sources, the keys are "reward (source)".

    The sum, `score`, is one of them where training has it alone.
    """
    is_sum_shown = SCORE in training_rewards(metrics)
    rewards: dict[tuple[str, str], dict[int, float]] = {}
    for key, curve in curves(metrics).items():
        match = VALIDATION_KEY.fullmatch(key)
        # verl logs the sum twice, by the names of `SCORE` and `SCORE_IN_VALIDATION`.
        if match is None or match["reward"] == SCORE:
            continue
        name = match["reward"]
        if name == SCORE_IN_VALIDATION:
            if not is_sum_shown:
                continue
            name = SCORE
        rewards.setdefault((name, match["source"]), {}).update(curve)

    sources = {source for _, source in rewards}
    if len(sources) == 1:
        return {name: curve for (name, _), curve in rewards.items()}
    return {f"{name} ({source})": curve for (name, source), curve in rewards.items()}


@dataclass(frozen=True)
class EndValue:
    """A value of a reward, and its step where that is not the one that the name says."""

    value: float
    other_step: int | None = None

    def __str__(self) -> str:
        text = short_number(self.value)
        if self.other_step is not None:
            text += f" (step {self.other_step})"
        return text


def ends(metrics: Metrics) -> dict[str, dict[str, EndValue]]:
    """Return {reward: {one of `ENDS`: its value}}, without those that were not measured.

    A validation is before the training if it is of step 0, as verl counts, and after it otherwise.
    """
    training = training_rewards(metrics)
    validation = validation_rewards(metrics)
    steps: set[int] = set()
    for curve in training.values():
        steps.update(curve)
    last = max(steps, default=0)

    values: dict[str, dict[str, EndValue]] = {}
    for name, curve in training.items():
        values[name] = {
            "first step": _end(curve, min(curve), named=1),
            "last step": _end(curve, max(curve), named=last),
        }
    for name, curve in validation.items():
        of_one = values.setdefault(name, {})
        if 0 in curve:
            of_one["validation before"] = EndValue(curve[0])
        later = max(curve)
        if later > 0:
            of_one["after"] = _end(curve, later, named=max(last, later))
    return values


def _end(curve: Mapping[int, float], step: int, named: int) -> EndValue:
    """Return the value of a step, given the step that its name in `ENDS` says."""
    if step == named:
        return EndValue(curve[step])
    return EndValue(curve[step], other_step=step)
