"""Reads the metrics of a W&B run: from W&B's server, from its file on this machine, or from CSV.

Relies on wandb 0.31: `Api().run(path)` with `name`, `config` and `scan_history()`, which are
documented; the records in `wandb.proto.wandb_internal_pb2`, and that run-ID.wandb holds them in the
format of LevelDB's log, which are not.
"""

import csv
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_gdpo.run.folder import Metrics

SERVER = "wandb:"
STEP_COLUMNS = ("_step", "Step", "training/global_step")  # of a history, of a panel, verl's own
# columns of a panel that are no metric of their own
EDGES = ("__MIN", "__MAX")
NOT_FINITE = ("NaN", "Infinity", "-Infinity")  # as W&B writes them into JSON

HEADER_BYTES, BLOCK_BYTES, RECORD_HEADER = 7, 32768, struct.Struct("<IHB")
WHOLE, LAST = 1, 4  # kinds of LevelDB's records, which may be cut at the end of a block

Found = tuple[str, Metrics, Any]  # the run's name, its metrics, its configuration or None


def read_server(address: str) -> Found:
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
    wandb = _wandb(address)
    try:
        run = wandb.Api().run(path)
        # `history` would return a sample of 500 steps
        metrics = _merged((row.get("_step"), row) for row in run.scan_history())
        return str(run.name or run.id), metrics, _config(dict(run.config))
    except (wandb.errors.Error, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{address}: {reason}. W&B needs a key (`wandb login` or WANDB_API_KEY), and "
            "WANDB_BASE_URL for a server of your own"
        ) from error


def read_file(path: Path) -> Found:
    """Return a run from the file that W&B keeps on the machine, offline or not.

    The name is "" where the file has none. A record that was cut by a crash ends the run.
    """
    _wandb(str(path))
    from wandb.proto import wandb_internal_pb2

    name = ""
    config: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    for data in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            name = record.run.display_name or name
            config |= _values(record.run.config.update)
        elif kind == "config":
            config |= _values(record.config.update)
        elif kind == "history":
            rows.append(_values(record.history.item))
    return name, _merged((row.get("_step"), row) for row in rows), _config(config)


def read_csv(files: Sequence[Path]) -> Metrics:
    """Return the metrics of one run from tables that W&B exported.

    A table is a panel ("Step", "RUN - METRIC", ...) or a history ("_step", METRIC, ...).

    Raises:
        ValueError: a table has no column of steps, or the tables have several runs.
    """
    runs: set[str] = set()
    rows: list[tuple[Any, dict[str, Any]]] = []
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
            rows += [
                (row[step], {names[c][1]: _cell(row[c]) for c in columns if names[c][1]})
                for row in table
            ]
    if len(runs) > 1:
        raise ValueError(
            f"{', '.join(map(str, files))}: the runs {sorted(runs)[:4]}; expected one. Export the "
            f"panel with one run shown, or name a run on the server: {SERVER}ENTITY/PROJECT/RUN"
        )
    return _merged(rows)


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


def _merged(rows: Iterable[tuple[Any, Mapping[str, Any]]]) -> Metrics:
    """{step: {name: number}} without W&B's own columns; NaN where W&B has no finite number."""
    steps: dict[int, dict[str, float]] = {}
    for step, row in rows:
        if step in (None, ""):
            continue
        values = {
            name: _number(value)
            for name, value in row.items()
            if not name.startswith("_") and (isinstance(value, int | float) or value in NOT_FINITE)
        }
        steps.setdefault(int(float(step)), {}).update(values)
    return {step: values for step, values in sorted(steps.items()) if values}


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return value if is_number else math.nan


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


def _wandb(source: str) -> Any:
    try:
        import wandb
    except ImportError:
        raise ValueError(f"{source}: needs wandb: pip install wandb") from None
    return wandb
