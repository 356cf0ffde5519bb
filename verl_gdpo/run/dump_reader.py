"""Reads rollout dumps (`trainer.rollout_data_dir`): one file per step, one JSON line per rollout.

    {"input": ..., "output": ..., "gts": ..., "score": 1.0, "step": 7, "uid": "<group>_0_0",
     "group": "<group>", "session": 0, "data_source": "rlla", "response_tokens": 41,
     "trained_tokens": 41, "rewards": {"format": 1.0, "correctness": 0.0}, "advantage": 0.3,
     "is_padding": false}

verl writes the first six keys, and `dump_writer.py` writes the others. `response_tokens` is the
length of the response, as scorers see it. `trained_tokens` counts the tokens that the policy trains
on: answers of tools and rejected tokens do not count. `rewards` holds everything that the scorer
returned, before weights and conditions.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_gdpo.batch.rows import RewardRows

DUMP_KEYS = (
    *("uid", "group", "session", "data_source"),
    *("response_tokens", "trained_tokens", "rewards", "advantage", "is_padding"),
)
WRITING = "verl is still writing it, or was stopped while writing"


def dump_files(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the complete dumps in the order of their steps, and the incomplete dumps.

    verl ends every line. If the last line has no end, verl is still writing the dump, or was
    stopped. Later dumps can still be complete: a run may have got further before it was resumed.

    Args:
        folder: a folder with files such as `7.jsonl`, or a run's folder with them in `rollouts/`.

    Raises:
        ValueError: there is no complete dump.
    """
    inner = folder / "rollouts"
    files = [path for path in (inner if inner.is_dir() else folder).glob("*.jsonl")]
    files = sorted((path for path in files if path.stem.isdecimal()), key=lambda p: int(p.stem))
    if not files:
        raise ValueError(
            f"{folder}: no rollout dump (STEP.jsonl) here or in rollouts/; "
            "a run writes one with trainer.rollout_data_dir=FOLDER"
        )
    whole = [path for path in files if _has_end(path)]
    if not whole:
        raise ValueError(
            f"{files[0]}: no dump here is complete. The last line has no end: {WRITING}"
        )
    return whole, [path for path in files if path not in whole]


def read_dump(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one step.

    Raises:
        ValueError: a line is not JSON, or verl-gdpo did not write it.
    """
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from None
            if isinstance(row, dict) and "trained_tokens" not in row and "response_tokens" in row:
                # an older dump has the number of trained tokens under that name
                row["trained_tokens"] = row["response_tokens"]
            absent = [key for key in DUMP_KEYS if not isinstance(row, dict) or key not in row]
            if absent:
                raise ValueError(
                    f"{path}, line {number}: no {absent}; expected a dump of verl's V1 trainer "
                    "with verl-gdpo and the estimator or the reward manager gdpo"
                )
            rows.append(row)
    return rows


def reward_rows(rows: Sequence[Mapping[str, Any]], step: int) -> RewardRows:
    """Return the rows of one step as the estimator saw them."""
    return RewardRows.from_keys(
        keys=[row["uid"] for row in rows],
        infos=[row["rewards"] for row in rows],
        sources=[row["data_source"] for row in rows],
        is_padding=[row["is_padding"] for row in rows],
        step=step,
    )


def _has_end(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def data_sources(folder: Path) -> set[str] | None:
    """Return the data sources of the last dump, or None without one, which stands for all."""
    try:
        return {row["data_source"] for row in read_dump(dump_files(folder)[0][-1])}
    except ValueError:
        return None
