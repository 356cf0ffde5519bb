"""Reads what a tracker kept of a run: its metrics, and from W&B's server its configuration.

verl logs to the trackers that `trainer.logger` names. A user names a run by one of these:

    FOLDER                     a run of our recipes, with metrics/1.jsonl
    PROJECT/EXPERIMENT.jsonl   verl's file logger; or PROJECT, if it has one experiment
    tensorboard_log/.../       events.out.tfevents.*; or one such file
    wandb:ENTITY/PROJECT/RUN   W&B's server; `wandb sync` brings a run there that was offline

Relies on verl 0.9 `verl.utils.tracking`, for what `FileLogger` and `_TensorboardAdapter` write.
Relies on wandb 0.31: `Api().run(path)` with `name`, `config` and `scan_history()`, which are
documented.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.terminal import printable
from verl_gdpo.tools.run_folder.folder import (
    Metrics,
    finite_or_nan,
    merged,
    read_config,
    read_metrics,
)

SERVER = "wandb:"
EXPECTED = (
    "expected the folder of a run, a file of verl's file logger (PROJECT/EXPERIMENT.jsonl), a "
    f"tensorboard folder, or {SERVER}ENTITY/PROJECT/RUN (`wandb sync FOLDER` brings a run there)"
)
PATTERNS = ("*tfevents*", "tensorboard/*tfevents*", "*.jsonl")  # the first that has any counts
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
        logged = Logged(path.stem, *_of_files([path]), _config_of(path.parent))
    elif path.is_dir():
        kind, metrics = _of_folder(path)
        logged = Logged(path.resolve().name, kind, metrics, _config_of(path), path)
    else:
        raise ValueError(f"{path}: no such file or folder; {EXPECTED}")
    if not logged.metrics:
        raise ValueError(f"{source}: no step in it ({logged.kind}); {EXPECTED}")
    return logged


def _config_of(folder: Path) -> Any:
    """Return the configuration of a run; None, with a warning, if it is damaged.

    The metrics of the run say what a reader came for, and are whole.
    """
    try:
        return read_config(folder)
    except ValueError as error:
        print(f"WARNING: {printable(str(error))}", file=sys.stderr)
        return None


def _of_folder(folder: Path) -> tuple[str, Metrics]:
    if metrics := read_metrics(folder):
        return "file logger", metrics
    for pattern in PATTERNS:
        # a file such as `7.jsonl` holds rollouts
        files = sorted(path for path in folder.glob(pattern) if not path.stem.isdecimal())
        # each start of a resumed run has a file of events
        if len(files) > 1 and pattern == "*.jsonl":
            raise ValueError(f"{folder}: holds several runs; name one of its files")
        if files:
            return _of_files(files)
    raise ValueError(f"{folder}: no metrics in it; {EXPECTED}")


def _of_files(files: Sequence[Path]) -> tuple[str, Metrics]:
    """The kind of tracker, and what its files hold; a later file is of a later start, and wins."""
    if "tfevents" not in files[0].name:
        return "file logger", read_metrics(files[0])
    reader = _imported("tensorboard.backend.event_processing.event_accumulator", files[0])
    # 0 keeps all values; the default is a sample of 10,000
    options: dict[str, Any] = {"size_guidance": {"scalars": 0}, "purge_orphaned_data": False}
    read = [reader.EventAccumulator(str(file), **options).Reload() for file in files]
    return "tensorboard", merged(
        (event.step, {name: event.value})
        for events in read
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    )


def _of_server(address: str) -> Logged:
    """Return every step of a run of W&B's server; NaN where W&B has no finite number."""
    wandb = _imported("wandb", address)
    try:
        run = wandb.Api().run(address.removeprefix(SERVER))
        # `history` would return a sample of 500 steps; `_step` and the like are W&B's own columns
        metrics = merged(
            (
                int(row["_step"]),
                {
                    name: finite_or_nan(value)
                    for name, value in row.items()
                    if name[0] != "_" and (isinstance(value, int | float) or value in NOT_FINITE)
                },
            )
            for row in run.scan_history()
        )
    except (wandb.errors.Error, ValueError, OSError) as error:
        raise ValueError(f"{address}: {error}; W&B needs a key (`wandb login`)") from error
    config = OmegaConf.create(dict(run.config))
    return Logged(run.name, "W&B", metrics, config if "algorithm" in config else None)


def _imported(module: str, source: object) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{source}: needs {package}: pip install {package}") from None
