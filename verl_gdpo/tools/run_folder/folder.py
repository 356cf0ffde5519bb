"""Writes and reads the files in a run's folder.

runs/2026-01-31_12-00-00/
  train.log          everything that verl printed
  metrics/1.jsonl    the metrics; one file per start, because verl's file logger truncates its file
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
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_gdpo.terminal import note
from verl_gdpo.tools.run.checkpoints import STARTS, manifests_in
from verl_gdpo.tools.run.starts import COMPOSED
from verl_gdpo.tools.run_folder.yaml_files import read_text

# `val-aux/<data source>/<reward>/mean@<samples>`; verl uses val-core for a reward named acc
VALIDATION_KEY = re.compile(r"val-(?:aux|core)/(?P<source>.*)/(?P<reward>[^/]+)/mean@\d+")

# the sum of all rewards, as verl logs it in training and in validation; a run without verl-gdpo has
# no other reward in its metrics
SCORE, SCORE_KEY, SCORE_IN_VALIDATION = "score", "critic/score/mean", "reward"

# `gdpo/<reward>/mean/<data source>`, which a run on several data sources has
TRAINING_KEY = re.compile(r"gdpo/(?P<reward>.+?)/mean/(?P<source>.+)")

RECIPES = "verl-gdpo"  # `recipes` of recipes/train.yaml
ENDS = ("first step", "last step", "validation before", "after")
NOTHING = "-"

Metrics = Mapping[int, Mapping[str, float]]
Curve = TypeVar("Curve", bound=Mapping[int, float])


def claim_metrics_file(run: Path) -> Path:
    """Make a new file for verl's file logger, which no other start of this run writes."""
    folder = run / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    number = max((int(path.stem) for path in _metrics_files(folder)), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another start made the file first
            path = folder / f"{number}.jsonl"
            path.touch(exist_ok=False)
            return path


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
    chosen = {"VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"} & os.environ.keys()
    if "file" in config.trainer.logger and not chosen:
        os.environ["VERL_FILE_LOGGER_PATH"] = str(claim_metrics_file(run))


class MetricsReader:
    """Reads the metrics of a run while it writes them; each call of `new` continues the last one.

    run: the folder of a run, or a single file of verl's file logger. It may get another name
        between two calls.
    problems: a message for each line that could not be read, with its file and number.
    """

    def __init__(self, run: Path) -> None:
        self.problems: list[str] = []
        self.run = run
        self._read: dict[str, tuple[int, int]] = {}  # {name of a file: (bytes, lines) read so far}

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield (step, {name: value}) for each new line, in the order of the run's starts.

        A value that is not a finite number becomes NaN; verl writes it as null. A last line without
        its end is skipped until verl has written the end.
        """
        files = [self.run] if self.run.is_file() else _metrics_files(self.run / "metrics")
        for path in files:
            offset, number = self._read.get(path.name, (0, 0))
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    offset, number = offset + len(line), number + 1
                    self._read[path.name] = offset, number
                    try:
                        yield _step_of(line)
                    except (ValueError, LookupError, TypeError, AttributeError) as error:
                        self.problems.append(f"{path}, line {number} left out: {error!r}")


def read_metrics(run: Path) -> Metrics:
    """Return {step: {name: value}} over all starts of a run; a later start wins.

    Lines that cannot be read are left out, with one warning.
    """
    reader = MetricsReader(run)
    metrics = merged(reader.new())
    if problems := reader.problems:
        note(f"WARNING: {len(problems)} lines of {run} left out; {problems[0]}")
    return metrics


def merged(rows: Iterable[tuple[int, Mapping[str, float]]]) -> Metrics:
    """Return the metrics of rows (step, values), by step; a later row wins."""
    steps: dict[int, dict[str, float]] = {}
    for step, values in rows:
        steps.setdefault(step, {}).update(values)
    return dict(sorted(steps.items()))


def _metrics_files(folder: Path) -> list[Path]:
    """Return the metrics files in the order of the starts; other files are ignored."""
    numbered = (path for path in folder.glob("*.jsonl") if path.stem.isdecimal() and path.is_file())
    return sorted(numbered, key=lambda path: int(path.stem))


def _step_of(line: bytes) -> tuple[int, dict[str, float]]:
    record = json.loads(line)
    data = record["data"]
    return int(record["step"]), {name: finite_or_nan(value) for name, value in data.items()}


def finite_or_nan(value: Any) -> float:
    """Return a finite number as it is, and NaN for anything else."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if is_number else math.nan


def config_of_run(folder: Path) -> Path | None:
    """Return the file with a run's configuration, given its folder, its rollouts/ or a dump.

    It is the one of the last start.
    """
    folder = folder.parent if folder.is_file() else folder
    places = [folder]
    if folder.name == "rollouts":
        places.append(folder.parent)
    for run in places:
        if recorded := manifests_in(run / STARTS):
            return recorded[-1].with_name(COMPOSED)
        for place in ("hydra/*/", "hydra/", ""):
            if files := sorted(run.glob(f"{place}.hydra/config.yaml")):
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
    try:
        return OmegaConf.create(read_text(file))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"{file}: cannot be read: {error}") from None


def load_config(path: Path) -> Any:
    """Return the configuration in a file, or in a folder that Hydra made, as a DictConfig.

    Raises:
        ValueError: there is none.
    """
    file = config_of_run(path) if path.is_dir() else path
    config: Any = None
    if file is not None:
        config = _loaded(file)
    block = OmegaConf.select(config, "algorithm") if OmegaConf.is_dict(config) else None
    if not OmegaConf.is_dict(block):
        raise ValueError(f"{path}: no `algorithm` block; expected .hydra/config.yaml of Hydra")
    return config


def curves(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Return {metric: {step: value}}."""
    by_metric: dict[str, dict[int, float]] = {}
    for step, values in metrics.items():
        for key, value in values.items():
            by_metric.setdefault(key, {})[step] = value
    return by_metric


def of_each_reward(all_curves: Mapping[str, Curve], statistic: str) -> dict[str, Curve]:
    """Return {reward: {step: value}} of the `curves` named `gdpo/<reward>/<statistic>`."""
    pattern = re.compile(rf"gdpo/(.+)/{statistic}")
    matches = ((pattern.fullmatch(key), curve) for key, curve in all_curves.items())
    return {match[1]: curve for match, curve in matches if match}


def training_rewards(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Return {reward: {step: mean}}; with several data sources, the keys are "reward (source)".

    Metrics that name no reward have the reward `score`: the sum that verl logs.
    """
    all_curves = curves(metrics)
    matches = ((TRAINING_KEY.fullmatch(key), curve) for key, curve in all_curves.items())
    rewards = {f"{match['reward']} ({match['source']})": curve for match, curve in matches if match}
    rewards = rewards or of_each_reward(all_curves, "mean")
    score = {SCORE: all_curves[SCORE_KEY]} if SCORE_KEY in all_curves else {}
    return rewards or score


def validation_rewards(metrics: Metrics) -> dict[str, dict[int, float]]:
    """Return {reward: {step: mean}}; with several data sources, the keys are "reward (source)".

    The sum, `score`, is one of them where training has it alone.
    """
    total = SCORE if SCORE in training_rewards(metrics) else ""
    names = {SCORE: "", SCORE_IN_VALIDATION: total}  # the two are one, and one is enough
    rewards: dict[tuple[str, str], dict[int, float]] = {}
    for key, steps in curves(metrics).items():
        match = VALIDATION_KEY.fullmatch(key)
        if match and (name := names.get(match["reward"], match["reward"])):
            rewards.setdefault((name, match["source"]), {}).update(steps)
    alone = len({source for _, source in rewards}) == 1
    return {r if alone else f"{r} ({source})": steps for (r, source), steps in rewards.items()}


@dataclass(frozen=True)
class EndValue:
    """A value of a reward, and its step where that is not the one that the name says."""

    value: float
    other_step: int | None = None

    def __str__(self) -> str:
        place = "" if self.other_step is None else f" (step {self.other_step})"
        return f"{self.value:.3f}{place}"


def ends(metrics: Metrics) -> dict[str, dict[str, EndValue]]:
    """{reward: {one of `ENDS`: its value}}, without those that were not measured.

    A validation is before the training if it is of step 0, as verl counts, and after it otherwise.
    """
    training, validation = training_rewards(metrics), validation_rewards(metrics)
    last = max((step for curve in training.values() for step in curve), default=0)
    values: dict[str, dict[str, EndValue]] = {name: {} for name in (*training, *validation)}
    for name, curve in training.items():
        values[name]["first step"] = _end(curve, min(curve), named=1)
        values[name]["last step"] = _end(curve, max(curve), named=last)
    for name, curve in validation.items():
        if 0 in curve:
            values[name]["validation before"] = EndValue(curve[0])
        if later := [step for step in curve if step > 0]:
            values[name]["after"] = _end(curve, max(later), named=max(last, *later))
    return values


def _end(curve: Mapping[int, float], step: int, named: int) -> EndValue:
    return EndValue(curve[step], None if step == named else step)
