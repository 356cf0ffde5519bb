"""What a run leaves in its folder, and how to read it.

runs/2026-01-31_12-00-00/
  train.log          everything that verl printed
  metrics/1.jsonl    verl's file logger, a file for each start (it truncates on resume)
  rollouts/7.jsonl   the rollouts of step 7, with rewards and advantages
  validation/        the same for validation
  checkpoints/
  rewards.png        the curves
  report/            `verl-gdpo report`
  hydra/             the configuration, in .hydra/config.yaml
  versions.json      of Python and the packages, at the last start
  lock               held by the launcher; its process id

`tensorboard/` and `wandb/` are there if `trainer.logger` has those.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.terminal import printable

# `val-aux/<data source>/<reward>/mean@<samples>`, or val-core for a reward called acc
VALIDATION_KEY = re.compile(r"val-(?:aux|core)/(?P<source>.*)/(?P<reward>[^/]+)/mean@\d+")

# what a result depends on
PACKAGES = ("verl-gdpo", "verl", "torch", "ray", "vllm", "transformers")

GAPS_SHOWN = 5  # steps

Metrics = Mapping[int, Mapping[str, float]]


def claim_metrics_file(run: Path) -> Path:
    """Make the file that verl's file logger is to write in this start, and no other start."""
    folder = run / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    number = max((int(path.stem) for path in _metrics_files(folder)), default=0)
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):  # another start was faster
            path = folder / f"{number}.jsonl"
            path.touch(exist_ok=False)
            return path


def write_into_run_dir(config: Any) -> None:
    """Let verl's loggers write into `run_dir`, a key of our recipes, and not where Python started.

    Changes the environment of this process where it does not say something else. Relies on verl
    0.7.1 to 0.9 `verl.utils.tracking`, which reads it when training starts.
    """
    if not config.get("run_dir"):
        return
    run = Path(config.run_dir).resolve()
    run.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TENSORBOARD_DIR", f"{run}/tensorboard")
    os.environ.setdefault("WANDB_DIR", str(run))
    said = {"VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"} & os.environ.keys()
    if "file" in config.trainer.logger and not said:
        os.environ["VERL_FILE_LOGGER_PATH"] = str(claim_metrics_file(run))


class MetricsReader:
    """The metrics of a run as they grow: each call of `new` reads on where the last one ended.

    problems: what could not be read, each with its file and line.
    """

    def __init__(self, run: Path) -> None:
        self.problems: list[str] = []
        self._folder = run / "metrics"
        self._read: dict[Path, tuple[int, int]] = {}  # bytes and lines

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, {name: value}) of each new line, over all starts of the run in their order.

        What is no finite number is NaN here: verl writes null. A last line without its end is one
        that verl is writing: it is new once it has its end.
        """
        for path in _metrics_files(self._folder):
            offset, number = self._read.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    offset, number = offset + len(line), number + 1
                    self._read[path] = offset, number
                    try:
                        yield _step_of(line)
                    except (ValueError, LookupError, TypeError, AttributeError) as error:
                        self.problems.append(f"{path}, line {number} left out: {error!r}")


def read_metrics(run: Path) -> Metrics:
    """{step: {name: value}} over all starts of a run; a later start wins.

    A line that cannot be read is left out, and said on stderr.
    """
    reader = MetricsReader(run)
    steps: dict[int, dict[str, float]] = {}
    for step, values in reader.new():
        steps.setdefault(step, {}).update(values)
    for problem in reader.problems:
        print(f"WARNING: {printable(problem)}", file=sys.stderr)
    return dict(sorted(steps.items()))


def _metrics_files(folder: Path) -> list[Path]:
    """In the order of the starts; what else lies there is not verl's."""
    numbered = (path for path in folder.glob("*.jsonl") if path.stem.isdecimal() and path.is_file())
    return sorted(numbered, key=lambda path: int(path.stem))


def _step_of(line: bytes) -> tuple[int, dict[str, float]]:
    record = json.loads(line)
    return int(record["step"]), {name: _number(value) for name, value in record["data"].items()}


def _number(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return value if is_number else math.nan


def gaps(metrics: Metrics) -> list[str]:
    """What is no finite number at which steps, a text for the metrics of the same steps."""
    steps_of: dict[str, list[int]] = {}
    for step, values in metrics.items():
        for name in (name for name, value in values.items() if math.isnan(value)):
            steps_of.setdefault(name, []).append(step)
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name, steps in steps_of.items():
        names_of.setdefault(tuple(steps), []).append(name)
    return [
        f"no finite number at step {', '.join(map(str, steps[:GAPS_SHOWN]))}"
        + (f" and {len(steps) - GAPS_SHOWN} more" if len(steps) > GAPS_SHOWN else "")
        + f": {', '.join(names)}"
        for steps, names in names_of.items()
    ]


def write_versions(run: Path) -> None:
    """What `read_versions` reads; a package that is not installed is left out."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    (run / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


def read_versions(run: Path) -> dict[str, str]:
    """{package: version}; empty for a run that was not started by `launch`."""
    file = run / "versions.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def config_of_run(folder: Path) -> Path | None:
    """The configuration that Hydra wrote for a run, given its folder or its rollouts/."""
    for run in (folder, folder.parent) if folder.name == "rollouts" else (folder,):
        for path in (run / "hydra/.hydra/config.yaml", run / ".hydra/config.yaml"):
            if path.exists():
                return path
    return None


def read_config(run: Path) -> Any:
    """The configuration that Hydra left, as a DictConfig; None where it left none."""
    file = config_of_run(run)
    return None if file is None else OmegaConf.load(file)


def curve(metrics: Metrics, key: str) -> dict[int, float]:
    """{step: value} of one metric, empty where no step has it."""
    return {step: values[key] for step, values in metrics.items() if key in values}


def of_each_reward(metrics: Metrics, statistic: str) -> dict[str, dict[int, float]]:
    """{reward: {step: value}} of the metrics `gdpo/<reward>/<statistic>`."""
    curves: dict[str, dict[int, float]] = {}
    for step, values in metrics.items():
        for key, value in values.items():
            prefix, _, rest = key.partition("/")
            reward, _, last = rest.rpartition("/")
            if prefix == "gdpo" and reward and last == statistic:
                curves.setdefault(reward, {})[step] = value
    return curves


def training_rewards(metrics: Metrics) -> dict[str, dict[int, float]]:
    """{reward: {step: mean over the step's samples}}."""
    return of_each_reward(metrics, "mean")


def validation_rewards(metrics: Metrics) -> dict[str, dict[int, float]]:
    """{reward: {step: mean}}; with several data sources, {"reward (source)": ...}."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for step, values in metrics.items():
        for key, value in values.items():
            match = VALIDATION_KEY.fullmatch(key)
            if match and match["reward"] not in ("reward", "score"):
                found.setdefault((match["reward"], match["source"]), {})[step] = value
    alone = len({source for _, source in found}) == 1
    return {r if alone else f"{r} ({source})": curve for (r, source), curve in found.items()}
