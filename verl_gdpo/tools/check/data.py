"""Reads the data files of a run as verl's dataset does, without the tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json
import pyarrow.parquet
from omegaconf import ListConfig, OmegaConf

from verl_gdpo.rewards import check_ground_truths
from verl_gdpo.settings.of_run import uses_gdpo_manager

READERS = {
    ".parquet": pa.parquet.read_table,
    ".json": pa.json.read_json,
    ".jsonl": pa.json.read_json,
}


@dataclass(frozen=True)
class Row:
    label: str  # "row 5 of data/train.parquet"
    source: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class DataFile:
    path: str
    table: pa.Table

    @property
    def sources(self) -> list[str]:
        return list(self.table["data_source"].to_pylist())

    def row(self, index: int) -> Row:
        (fields,) = self.table.slice(index, 1).to_pylist()
        return Row(f"row {index} of {self.path}", fields["data_source"], fields)


def read_files(config: Any, key: str) -> list[DataFile] | None:
    """Return the files of `data.<key>` after checking them.

    The result is None if only verl can read them: a path is a URL, or a dataset class is set.

    Raises:
        ValueError: a file does not exist, is not readable, lacks a column, or has a row that our
            scorer cannot use.
    """
    files = config.data[key]
    if not files:
        raise ValueError(f"data.{key}={files}: verl needs rows for training and for validation")
    paths = [str(file) for file in files] if isinstance(files, list | ListConfig) else [str(files)]
    if OmegaConf.select(config, "data.custom_cls.path") or any("://" in path for path in paths):
        return None
    return [DataFile(path, _read(config, key, path)) for path in paths]


def _read(config: Any, key: str, path: str) -> pa.Table:
    where = f"data.{key}: {path}"
    file = Path(path).expanduser()
    if not file.exists():
        raise ValueError(
            f"{where} does not exist. The files of a task are made by: verl-gdpo data TASK --out "
            f"{file.parent}"
        )
    reader = READERS.get(file.suffix)
    if reader is None:
        raise ValueError(f"{where}: verl reads files that end in {', '.join(READERS)}")
    try:
        table = reader(file)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{where} cannot be read: {error}") from error
    absent = sorted({config.data.prompt_key, "data_source", "reward_model"} - {*table.column_names})
    if absent:
        raise ValueError(f"{where} lacks the columns {absent}")
    kind = table.schema.field("reward_model").type
    if not pa.types.is_struct(kind):
        raise ValueError(f"{where}: reward_model is {kind}; expected {{ground_truth: ...}}")
    if table.num_rows == 0:
        raise ValueError(f"{where} holds no rows")
    _check_prompts(f"{where}: {config.data.prompt_key}", table.schema.field(config.data.prompt_key))
    if uses_gdpo_manager(config) and config.reward.custom_reward_function.path is None:
        rows = table.select(["data_source", "reward_model"]).to_pylist()
        check_ground_truths(rows, f"data.{key} {path}")
    return table


def _check_prompts(where: str, field: pa.Field) -> None:
    kind = field.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    messages = is_list and pa.types.is_struct(kind.value_type)
    names = {part.name for part in kind.value_type} if messages else set()
    if not {"role", "content"} <= names:
        raise ValueError(f"{where} is {kind}; expected a list of {{role: ..., content: ...}}")


def pick_rows(
    training: Sequence[DataFile], validation: Sequence[DataFile], count: int
) -> list[Row]:
    """Return `count` evenly spread training rows, and one row of each other data source."""
    places = [(file, index) for file in training for index in range(file.table.num_rows)]
    spread = np.linspace(0, len(places) - 1, min(count, len(places))).round().astype(int)
    rows = [file.row(index) for file, index in (places[place] for place in spread)]
    seen = {row.source for row in rows}
    return rows + list(_first_of_each([*training, *validation], seen))


def _first_of_each(files: Sequence[DataFile], seen: set[str]) -> Iterator[Row]:
    for file in files:
        sources = file.sources
        for source in dict.fromkeys(sources):
            if source not in seen:
                yield file.row(sources.index(source))
                seen = seen | {source}
