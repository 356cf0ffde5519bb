"""Reads what a tracker kept of a run: its metrics, and from W&B also its configuration.

verl logs to the trackers that `trainer.logger` names. A user names a run by one of these:

    FOLDER                     a run of our recipes, with metrics/1.jsonl
    PROJECT/EXPERIMENT.jsonl   verl's file logger; or PROJECT, if it has one experiment
    tensorboard_log/.../       events.out.tfevents.*; or one such file
    wandb/run-DATE-ID/         W&B on this machine, run-ID.wandb; or that file
    FOLDER or FILE.csv         tables exported from W&B
    wandb:ENTITY/PROJECT/RUN   W&B's server

Relies on verl 0.9 `verl.utils.tracking`, for what `FileLogger` and `_TensorboardAdapter`
write. `wandb_runs.py` reads W&B.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_gdpo.run.folder import Metrics, read_config, read_metrics
from verl_gdpo.run.wandb_runs import SERVER, read_csv, read_file, read_server

EXPECTED = (
    "expected the folder of a run, a file of verl's file logger (PROJECT/EXPERIMENT.jsonl), a "
    f"tensorboard or W&B folder, a CSV file of W&B, or {SERVER}ENTITY/PROJECT/RUN"
)
LOGGERS = "verl writes them with `file`, `tensorboard` or `wandb` in trainer.logger"
FILES = ("*tfevents*", "*.wandb", "*.csv", "*.jsonl")
# where the files of trackers are in the folder of a run; the first that has any counts
INSIDE = ("", "tensorboard/", "*run-*/", "wandb/*run-*/")
PARTS = ("*tfevents*", "*.csv")  # several files may be one run
SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Logged:
    """What was found under the path or address that a user named."""

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
        name, metrics, config = read_server(source)
        logged = Logged(name, "W&B", metrics, config)
    elif (path := Path(source)).is_file():
        logged = _of_files([path], path.stem)
    elif path.is_dir():
        logged = _of_folder(path)
    else:
        raise ValueError(f"{path}: no such file or folder; {EXPECTED}")
    if not logged.metrics:
        raise ValueError(f"{source}: no step in it ({logged.kind}); {EXPECTED}")
    return logged


def _of_folder(folder: Path) -> Logged:
    name, config = folder.resolve().name, read_config(folder)
    if metrics := read_metrics(folder):
        return Logged(name, "file logger", metrics, config, folder)
    found = _of_files(_files_in(folder), name)
    config = found.config if config is None else config
    return Logged(found.name, found.kind, found.metrics, config, folder)


def _files_in(folder: Path) -> list[Path]:
    for inside in INSIDE:
        for pattern in FILES:
            found = sorted(path for path in folder.glob(inside + pattern) if _is_metrics(path))
            # W&B writes a file of the same name for each start of a resumed run
            runs_of_wandb = {path.name for path in found if path.suffix == ".wandb"}
            if len(found) > 1 and pattern not in PARTS and len(runs_of_wandb) != 1:
                raise ValueError(f"{folder}: holds several runs; name one: {_few(folder, found)}")
            if found:
                return found
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
    """What the files of one tracker hold of one run."""
    first = files[0]
    if "tfevents" in first.name:
        return Logged(name, "tensorboard", _tensorboard(files))
    if first.suffix == ".csv":
        return Logged(name, "CSV of W&B", read_csv(files))
    if first.suffix == ".wandb":
        starts = [read_file(file) for file in files]  # by their dates
        shown, _, config = starts[-1]
        steps: dict[int, dict[str, float]] = {}
        for _, metrics, _ in starts:
            for step, values in metrics.items():
                steps.setdefault(step, {}).update(values)
        return Logged(shown or name, "W&B", dict(sorted(steps.items())), config)
    return Logged(first.stem, "file logger", read_metrics(first), read_config(first.parent))


def _tensorboard(files: Sequence[Path]) -> Metrics:
    """Every value of every scalar; a later file wins, because it is of a later start."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ValueError(f"{files[0]}: needs tensorboard: pip install tensorboard") from None
    steps: dict[int, dict[str, float]] = {}
    for file in files:
        # 0 keeps all values; the default is a sample of 10,000
        events = EventAccumulator(
            str(file), size_guidance={"scalars": 0}, purge_orphaned_data=False
        ).Reload()
        for name in events.Tags()["scalars"]:
            for event in events.Scalars(name):
                steps.setdefault(event.step, {})[name] = event.value
    return dict(sorted(steps.items()))
