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
"""

import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

# `val-aux/<data source>/<reward>/mean@<samples>`, or val-core for a reward called acc
VALIDATION_KEY = re.compile(r"val-(?:aux|core)/(?P<source>.*)/(?P<reward>[^/]+)/mean@\d+")

# what a result depends on
PACKAGES = ("verl-gdpo", "verl", "torch", "ray", "vllm", "transformers")

GAPS_SHOWN = 5  # steps

Metrics = Mapping[int, Mapping[str, float]]


def metrics_file_of_next_start(run: Path) -> Path:
    """Where verl's file logger should write (VERL_FILE_LOGGER_PATH); the folder is made."""
    folder = run / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{len(list(folder.glob('*.jsonl'))) + 1}.jsonl"


def read_metrics(run: Path) -> Metrics:
    """{step: {name: value}} over all starts of a run; a later start wins.

    What is no finite number is NaN here: verl writes null. A last line without its end is one that
    verl is writing, and is passed over.
    """
    steps: dict[int, dict[str, float]] = {}
    for file in sorted((run / "metrics").glob("*.jsonl"), key=lambda path: int(path.stem)):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                steps.setdefault(record["step"], {}).update(
                    (name, value if value is not None and math.isfinite(value) else math.nan)
                    for name, value in record["data"].items()
                )
    return dict(sorted(steps.items()))


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
