"""The replay as a table for other tools: a row a rollout, parquet or JSON lines."""

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo.replay.recompute import Floats
from verl_gdpo.reward_rows import group_of, split_key

FORMATS = (".parquet", ".json", ".jsonl")


class RolloutTable:
    """step, group, session, uid, data_source, response_tokens, reward/*, advantage/*."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        step: int,
        rows: Sequence[Mapping[str, Any]],
        reward_names: Sequence[str],
        advantages: Mapping[str, Floats],
    ) -> None:
        """Rollouts of a step; a reward that a rollout does not have is null."""
        columns = {name: values.tolist() for name, values in advantages.items()}
        for i, row in enumerate(rows):
            record = {
                "step": step,
                "group": group_of(row["uid"]),
                "session": split_key(split_key(row["uid"])[0])[1],
                "uid": row["uid"],
                "data_source": row["data_source"],
                "response_tokens": row["response_tokens"],
            }
            for name in reward_names:
                value = row["rewards"].get(name)
                record[f"reward/{name}"] = None if value is None else float(value)
            record.update((f"advantage/{name}", values[i]) for name, values in columns.items())
            self.rows.append(record)

    def write(self, path: Path) -> None:
        """Whole or not at all; a reward that only some steps have is null in the others."""
        check_format(path)
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            if path.suffix == ".parquet":
                columns = {name: [row.get(name) for row in self.rows] for name in names}
                rewards = {name: pa.float64() for name in names if name.startswith("reward/")}
                arrays = {n: pa.array(column, rewards.get(n)) for n, column in columns.items()}
                pq.write_table(pa.table(arrays), temporary)
            else:
                with temporary.open("w", encoding="utf-8") as file:
                    for row in self.rows:
                        file.write(json.dumps({name: row.get(name) for name in names}) + "\n")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def check_format(path: Path) -> None:
    """Raises ValueError for a file name that says no format."""
    if path.suffix not in FORMATS:
        raise ValueError(f"--out {path}: expected a name that ends in {', '.join(FORMATS)}")
