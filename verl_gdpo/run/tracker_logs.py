"""Reads what a tracker kept of a run: its metrics, and from W&B also its configuration.

verl logs to the trackers that `trainer.logger` names. A user names a run by one of these:

    FOLDER                     a run of our recipes, with metrics/1.jsonl
    PROJECT/EXPERIMENT.jsonl   verl's file logger; or PROJECT, if it has one experiment
    tensorboard_log/.../       events.out.tfevents.*; or one such file
    wandb/run-DATE-ID/         W&B on this machine, run-ID.wandb; or that file
    FOLDER or FILE.csv         tables exported from W&B
    wandb:ENTITY/PROJECT/RUN   W&B's server

TRL's logs are read from the same trackers, from its trainer_state.json, and from the same entries
as JSONL; `trl_logs.py` gives their metrics verl's names.

Relies on verl 0.9 `verl.utils.tracking`, for what `FileLogger` and `_TensorboardAdapter` write.
Relies on wandb 0.31: `Api().run(path)` with `name`, `config` and `scan_history()`, which are
documented; the records in `wandb.proto.wandb_internal_pb2`, and that run-ID.wandb holds them in the
format of LevelDB's log, which are not.
"""

import csv
import importlib
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.run.folder import Metrics, finite_or_nan, merged, read_config, read_metrics
from verl_gdpo.run.trl_logs import STATE, in_verls_names, is_history, read_history

SERVER = "wandb:"
EXPECTED = (
    "expected the folder of a run, a file of verl's file logger (PROJECT/EXPERIMENT.jsonl), a "
    f"tensorboard or W&B folder, a CSV file of W&B, or {SERVER}ENTITY/PROJECT/RUN"
)
LOGGERS = "verl writes them with `file`, `tensorboard` or `wandb` in trainer.logger"
FILES = ("*tfevents*", "*.wandb", "*.csv", "*.jsonl", STATE)
# where the files of trackers are in the folder of a run; the first that has any counts
INSIDE = ("", "tensorboard/", "*run-*/", "wandb/*run-*/")
PARTS = ("*tfevents*", "*.csv")  # several files may be one run
SHOWN = 8  # names in a message

STEP_COLUMNS = ("_step", "Step", "training/global_step")  # of a history, of a panel, verl's own
EDGES = ("__MIN", "__MAX")  # columns of a panel that are no metric of their own
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as W&B writes them into JSON

HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4  # kinds of LevelDB's records, which may be cut at the end of a block


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
    """What the files of one tracker hold of one run; a later file is of a later start, and wins."""
    first = files[0]
    if "tfevents" in first.name:
        return Logged(name, "tensorboard", _tensorboard(files))
    if first.suffix == ".csv":
        return Logged(name, "CSV of W&B", _tables(files))
    if first.suffix == ".wandb":
        return _of_wandb(files, name)
    if is_history(first):
        name = first.resolve().parent.name if first.name == STATE else first.stem
        return Logged(name, "history", read_history(first))
    return Logged(first.stem, "file logger", read_metrics(first), read_config(first.parent))


def _tensorboard(files: Sequence[Path]) -> Metrics:
    """Every value of every scalar."""
    reader = _imported("tensorboard.backend.event_processing.event_accumulator", files[0])
    # 0 keeps all values; the default is a sample of 10,000
    given: dict[str, Any] = {"size_guidance": {"scalars": 0}, "purge_orphaned_data": False}
    read = [reader.EventAccumulator(str(file), **given).Reload() for file in files]
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


def _of_wandb(files: Sequence[Path], name: str) -> Logged:
    """Return a run from the files of its starts, which W&B keeps on the machine, offline or not.

    A record that was cut by a crash ends a file.
    """
    records = _imported("wandb.proto.wandb_internal_pb2", files[0])
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for file in files:
        config = {}
        for data in _records(file.read_bytes()):
            record = records.Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                name = record.run.display_name or name
                config |= _values(record.run.config.update)
            elif kind == "config":
                config |= _values(record.config.update)
            elif kind == "history":
                rows.append(_values(record.history.item))
    return Logged(name, "W&B", _of_rows(rows), _config(config))


def _tables(files: Sequence[Path]) -> Metrics:
    """Return the metrics of one run from tables that W&B exported.

    A table is a panel ("Step", "RUN - METRIC", ...) or a history ("_step", METRIC, ...).

    Raises:
        ValueError: a table has no column of steps, or the tables have several runs.
    """
    runs: set[str] = set()
    rows: list[dict[str, Any]] = []
    for file in files:
        with file.open(newline="", encoding="utf-8-sig") as text:
            table = csv.DictReader(text)
            columns = list(table.fieldnames or ())
            step = next((name for name in STEP_COLUMNS if name in columns), None)
            if step is None:
                raise ValueError(
                    f"{file}: no column {' or '.join(STEP_COLUMNS)}, got {columns[:4]}; export a "
                    "panel with the step on its x axis"
                )
            names = {column: _metric_of(column, step == "Step") for column in columns}
            runs |= {run for run, _ in names.values() if run}
            for row in table:
                cells = {names[c][1]: _cell(row[c]) for c in columns if names[c][1]}
                rows.append({**cells, "_step": row[step]})
    if len(runs) > 1:
        raise ValueError(
            f"{', '.join(map(str, files))}: the runs {sorted(runs)[:4]}; expected one. Export the "
            f"panel with one run shown, or name a run on the server: {SERVER}ENTITY/PROJECT/RUN"
        )
    return _of_rows(rows)


def _metric_of(column: str, is_panel: bool) -> tuple[str, str]:
    """(run, metric) of a column; the metric is "" for what is none."""
    run, _, metric = column.rpartition(" - ") if is_panel else ("", "", column)
    is_edge = is_panel and (not run or metric.endswith(EDGES))
    return run, "" if is_edge else metric


def _cell(text: str | None) -> Any:
    try:
        return float(text or "-")
    except ValueError:
        return None


def _of_rows(rows: Iterable[Mapping[str, Any]]) -> Metrics:
    """The metrics in rows of W&B, without its own columns; NaN where W&B has no finite number."""

    def metrics_of(row: Mapping[str, Any]) -> dict[str, float]:
        return {
            name: finite_or_nan(value)
            for name, value in row.items()
            if not name.startswith("_") and (isinstance(value, int | float) or value in NOT_FINITE)
        }

    with_steps = (row for row in rows if row.get("_step") not in (None, ""))
    found = merged((int(float(row["_step"])), metrics_of(row)) for row in with_steps)
    return {step: values for step, values in found.items() if values}


def _records(data: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log, after W&B's header."""
    position, record = HEADER_BYTES, b""
    while position + RECORD_HEADER.size <= len(data):
        left_in_block = -position % BLOCK_BYTES
        if 0 < left_in_block < RECORD_HEADER.size:
            position += left_in_block
            continue
        _crc, size, kind = RECORD_HEADER.unpack_from(data, position)
        start, position = position + RECORD_HEADER.size, position + RECORD_HEADER.size + size
        if position > len(data) or kind == 0:
            return
        record += data[start:position]
        if kind in (WHOLE, LAST):
            yield record
            record = b""


def _values(items: Iterable[Any]) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


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
