"""Reads what a tracker kept of a run: its metrics, and from W&B's server its configuration.

verl logs to the trackers that `trainer.logger` names. A user names a run by one of these:

    FOLDER                     one that holds the logs of a run as `PLACES` says, such as the run
                               of our recipes, or the folder in which a script of verl started
    PROJECT/EXPERIMENT.jsonl   verl's file logger
    train.log                  what a training printed, with the lines of verl's console logger
    tensorboard_log/.../       events.out.tfevents.*; or one such file
    wandb:ENTITY/PROJECT/RUN   W&B's server; `wandb sync` brings a run there that was offline

Relies on verl 0.9 `verl.utils.tracking`, for what `FileLogger` and `_TensorboardAdapter` write.
Relies on wandb 0.31: `Api().run(path)` with `name`, `config` and `scan_history()`, which are
documented.
"""

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.terminal import note
from verl_gdpo.tools.run_folder.console_log import read_console_log
from verl_gdpo.tools.run_folder.folder import (
    Metrics,
    finite_or_nan,
    merged,
    read_config,
    read_metrics,
)

SERVER = "wandb:"
WHAT_A_RUN_IS = (
    "the folder of a run, a file of verl's file logger (PROJECT/EXPERIMENT.jsonl), a log "
    "with the lines of verl's console logger, a tensorboard folder, or "
    f"{SERVER}ENTITY/PROJECT/RUN (`wandb sync FOLDER` brings a run there)"
)
# Where verl's loggers leave a run in a folder: those of tensorboard, of the file logger, and what
# was printed. The first that has any counts.
PLACES = (
    "*tfevents*",
    "tensorboard/*tfevents*",
    "*.jsonl",
    "*/*.jsonl",
    "tensorboard_log/**/*tfevents*",
    "*.log",
    "*.out",
    "wandb/*/files/output.log",
)
NAMED = 5  # runs in a message
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as W&B writes them into JSON


@dataclass(frozen=True)
class Logged:
    """What is under the path or address that a user named."""

    name: str
    kind: str  # of tracker, for a reader
    metrics: Metrics
    config: Any = None  # DictConfig, None where there is none
    folder: Path | None = None  # the folder that was named, which may hold more


def read_logged(source: str) -> Logged:
    """Return what a tracker kept of one run.

    Raises:
        ValueError: there are no metrics, or those of several runs.
    """
    path = Path(source)
    if source.startswith(SERVER):
        logged = _of_server(source)
    elif path.is_file():
        kind, metrics = _of_files([path])
        logged = Logged(path.stem, kind, metrics, _config_of(path.parent))
    elif path.is_dir():
        kind, metrics = _of_folder(path)
        logged = Logged(path.resolve().name, kind, metrics, _config_of(path), path)
    else:
        raise ValueError(f"{path}: no such file or folder; expected {WHAT_A_RUN_IS}")
    if not logged.metrics:
        raise ValueError(f"{source}: no step in it ({logged.kind}); expected {WHAT_A_RUN_IS}")
    return logged


def _config_of(folder: Path) -> Any:
    """Return the configuration of a run; None, with a warning, if it is damaged.

    The metrics of the run say what a reader came for, and are whole.
    """
    try:
        return read_config(folder)
    except ValueError as error:
        note(f"WARNING: {error}")
        return None


def _of_folder(folder: Path) -> tuple[str, Metrics]:
    """Return the kind of tracker, and the metrics of the one run in a folder; see `PLACES`.

    Raises:
        ValueError: there is none, or there are several.
    """
    metrics = read_metrics(folder)
    if metrics:
        return "file logger", metrics
    for place in PLACES:
        runs = _runs_in(folder, place)
        if len(runs) > 1:
            names = [str(run) for run in runs]
            shown = ", ".join(names[:NAMED])
            if len(names) > NAMED:
                shown += f" and {len(names) - NAMED} more"
            raise ValueError(f"{folder}: holds several runs; name one of them: {shown}")
        if runs:
            (files,) = runs.values()
            return _of_files(files)
    raise ValueError(f"{folder}: no metrics in it; expected {WHAT_A_RUN_IS}")


def _runs_in(folder: Path, place: str) -> dict[Path, list[Path]]:
    """Return {run: its files} for one of `PLACES` in a folder."""
    runs: dict[Path, list[Path]] = {}
    for path in sorted(folder.glob(place)):
        # wandb's `latest-run` is a link to a run that is found under its own name too.
        file = path.resolve()
        if not file.is_file() or not _has_steps(file):
            continue
        run = file
        if _is_tensorboard(file):
            # Each start of a resumed run has a file of events, and all lie in one folder.
            run = file.parent
        files = runs.setdefault(run, [])
        if file not in files:
            files.append(file)
    return runs


def _is_tensorboard(file: Path) -> bool:
    return "tfevents" in file.name


def _has_steps(file: Path) -> bool:
    """Return whether a file is of one of verl's loggers, and not of rollouts, rows or others."""
    if _is_tensorboard(file):
        return True
    if file.suffix == ".jsonl":
        # One such as `7.jsonl` holds rollouts.
        return not file.stem.isdecimal() and _is_of_file_logger(file)
    return _is_of_file_logger(file) or bool(read_console_log(file))


def _is_of_file_logger(file: Path) -> bool:
    """Return whether the first line has the form of verl's file logger."""
    with file.open("rb") as opened:
        try:
            record = json.loads(opened.readline())
        except (ValueError, RecursionError):
            return False
    return isinstance(record, dict) and {"step", "data"} <= record.keys()


def _of_files(files: Sequence[Path]) -> tuple[str, Metrics]:
    """Return the kind of tracker, and what its files hold.

    A later file is of a later start, and wins. Only a run of tensorboard has several.
    """
    if _is_tensorboard(files[0]):
        return "tensorboard", merged(_rows_of_events(files))
    if not _is_of_file_logger(files[0]):
        metrics = read_console_log(files[0])
        if metrics:
            return "console", metrics
    return "file logger", read_metrics(files[0])


def _rows_of_events(files: Sequence[Path]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield (step, {name: value}) for each step in files of tensorboard, one start after another.

    A file holds one metric after the other, so its steps are put together first.
    """
    reader = _imported("tensorboard.backend.event_processing.event_accumulator", files[0])
    for file in files:
        # 0 keeps all values; the default is a sample of 10,000.
        events = reader.EventAccumulator(
            str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False
        )
        events.Reload()
        steps: dict[int, dict[str, float]] = {}
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                steps.setdefault(event.step, {})[name] = event.value
        yield from sorted(steps.items())


def _of_server(address: str) -> Logged:
    """Return every step of a run of W&B's server; NaN where W&B has no finite number."""
    wandb = _imported("wandb", address)
    try:
        run = wandb.Api().run(address.removeprefix(SERVER))
        # `history` would return a sample of 500 steps.
        metrics = merged(_step_of_server(row) for row in run.scan_history())
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise ValueError(f"{address}: {error}; W&B needs a key (`wandb login`)") from error
    config: Any = OmegaConf.create(dict(run.config))
    if "algorithm" not in config:
        config = None
    return Logged(run.name, "W&B", metrics, config)


def _step_of_server(row: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """Return (step, {name: value}) of a row of W&B's history."""
    values = {}
    for name, value in row.items():
        # `_step` and the like are W&B's own columns.
        if name[0] == "_":
            continue
        if isinstance(value, int | float) or value in NOT_FINITE:
            values[name] = finite_or_nan(value)
    return int(row["_step"]), values


def _imported(module: str, source: object) -> Any:
    """Import a module that reads `source`; raise ValueError if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{source}: needs {package}: pip install {package}") from None
