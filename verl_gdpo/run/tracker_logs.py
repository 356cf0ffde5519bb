"""Reads what a tracker kept of a run: its metrics, and from W&B's server its configuration.

verl logs to the trackers that `trainer.logger` names. A user names a run by one of these:

    FOLDER                     a run of our recipes, with metrics/1.jsonl
    PROJECT/EXPERIMENT.jsonl   verl's file logger; or PROJECT, if it has one experiment
    tensorboard_log/.../       events.out.tfevents.*; or one such file
    wandb:ENTITY/PROJECT/RUN   W&B's server; `wandb sync` brings a run there that was offline

TRL's logs are read from the same trackers, from its trainer_state.json, and from the same entries
as JSONL; `trl_logs.py` gives their metrics verl's names.

Relies on verl 0.9 `verl.utils.tracking`, for what `FileLogger` and `_TensorboardAdapter` write.
Relies on wandb 0.31: `Api().run(path)` with `name`, `config` and `scan_history()`, which are
documented.
"""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.run.folder import Metrics, finite_or_nan, merged, read_config, read_metrics
from verl_gdpo.run.trl_logs import STATE, in_verls_names, is_history, read_history

SERVER = "wandb:"
EXPECTED = (
    "expected the folder of a run, a file of verl's file logger (PROJECT/EXPERIMENT.jsonl), a "
    f"tensorboard folder, or {SERVER}ENTITY/PROJECT/RUN (`wandb sync FOLDER` brings a run there)"
)
LOGGERS = "verl writes them with `file`, `tensorboard` or `wandb` in trainer.logger"
FILES = ("*tfevents*", "*.jsonl", STATE)
# where the files of trackers are in the folder of a run; the first that has any counts
INSIDE = ("", "tensorboard/")
SHOWN = 8  # names in a message

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
    if source.startswith(SERVER):
        logged = _of_server(source)
    elif (path := Path(source)).is_file():
        logged = _of_files([path], path.stem)
    elif path.is_dir():
        logged = _of_folder(path)
    else:
        raise ValueError(f"{path}: no such file or folder; {EXPECTED}")
    if not logged.metrics:
        raise ValueError(f"{source}: no step in it ({logged.kind}); {EXPECTED}")
    try:
        of_trl = in_verls_names(logged.metrics)
    except ValueError as error:
        raise ValueError(f"{source}: {error}; {EXPECTED}") from None
    return replace(logged, metrics=of_trl, kind=f"{logged.kind} of TRL") if of_trl else logged


def _of_folder(folder: Path) -> Logged:
    name, config = folder.resolve().name, read_config(folder)
    if metrics := read_metrics(folder):
        return Logged(name, "file logger", metrics, config, folder)
    logged = _of_files(_files_in(folder), name)
    return replace(logged, config=config or logged.config, folder=folder)


def _files_in(folder: Path) -> list[Path]:
    for inside in INSIDE:
        for pattern in FILES:
            files = sorted(path for path in folder.glob(inside + pattern) if _is_metrics(path))
            # each start of a resumed run has a file of events
            if len(files) > 1 and pattern != "*tfevents*":
                raise ValueError(f"{folder}: holds several runs; name one: {_few(folder, files)}")
            if files:
                return files
    deeper = {
        path for deep in ("*/", "*/*/") for name in FILES for path in folder.glob(deep + name)
    }
    named = {
        path if path.suffix == ".jsonl" else path.parent for path in deeper if _is_metrics(path)
    }
    runs = sorted(named | {path.parent for path in folder.glob("*/metrics")})
    hint = (
        f"; the runs in it are {_few(folder, runs)}: name those"
        if runs
        else f"; {LOGGERS}; {EXPECTED}"
    )
    raise ValueError(f"{folder}: no metrics in it{hint}")


def _is_metrics(path: Path) -> bool:
    """A file such as `7.jsonl` holds rollouts."""
    return path.is_file() and not (path.suffix == ".jsonl" and path.stem.isdecimal())


def _few(folder: Path, paths: Sequence[Path]) -> str:
    names = [str(path.relative_to(folder)) for path in paths]
    more = f" and {len(names) - SHOWN} more" if names[SHOWN:] else ""
    return ", ".join(names[:SHOWN]) + more


def _of_files(files: Sequence[Path], name: str) -> Logged:
    """What the files of one tracker hold of one run; a later file is of a later start, and wins."""
    first = files[0]
    if "tfevents" in first.name:
        return Logged(name, "tensorboard", _tensorboard(files))
    if is_history(first):
        name = first.resolve().parent.name if first.name == STATE else first.stem
        return Logged(name, "history", read_history(first))
    return Logged(first.stem, "file logger", read_metrics(first), read_config(first.parent))


def _tensorboard(files: Sequence[Path]) -> Metrics:
    """Every value of every scalar."""
    reader = _imported("tensorboard.backend.event_processing.event_accumulator", files[0])
    # 0 keeps all values; the default is a sample of 10,000
    options: dict[str, Any] = {"size_guidance": {"scalars": 0}, "purge_orphaned_data": False}
    read = [reader.EventAccumulator(str(file), **options).Reload() for file in files]
    return merged(
        (event.step, {name: event.value})
        for events in read
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    )


def _of_server(address: str) -> Logged:
    """Return a run of W&B's server, every step of it.

    Args:
        address: `wandb:ENTITY/PROJECT/RUN`. RUN is the id in the run's web address.

    Raises:
        ValueError: there is no such run, or no access to it.
    """
    path = address.removeprefix(SERVER)
    if len([part for part in path.split("/") if part]) != 3:
        raise ValueError(
            f"{address}: expected {SERVER}ENTITY/PROJECT/RUN, where RUN is the id at the end of "
            "the run's web address"
        )
    wandb = _imported("wandb", address)
    try:
        run = wandb.Api().run(path)
        # `history` would return a sample of 500 steps
        metrics = _of_rows(run.scan_history())
        return Logged(str(run.name or run.id), "W&B", metrics, _config(dict(run.config)))
    except (wandb.errors.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{address}: {reason}. W&B needs a key (`wandb login` or WANDB_API_KEY), and "
            "WANDB_BASE_URL for a server of your own"
        ) from error


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """The metrics in rows of W&B, without its own columns; NaN where W&B has no finite number."""

    def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
        return {
            name: finite_or_nan(value)
            for name, value in row.items()
            if not name.startswith("_") and (isinstance(value, int | float) or value in NOT_FINITE)
        }

    metrics = merged((int(row["_step"]), metrics_of(row)) for row in rows if "_step" in row)
    return {step: values for step, values in metrics.items() if values}


def _config(values: Mapping[str, Any]) -> Any:
    """verl's configuration as a DictConfig; None for a run that logged none, or another one's."""
    kept = {name: value for name, value in values.items() if not name.startswith("_")}
    return OmegaConf.create(kept) if "algorithm" in kept else None


def _imported(module: str, source: object) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ValueError(f"{source}: needs {package}: pip install {package}") from None
