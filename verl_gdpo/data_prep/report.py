"""Computes numbers about checked rows, to look at before training."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from verl_gdpo.data_prep.schema import Row, Splits, question_of
from verl_gdpo.rewards.task import Task

CHARS = [f"prompt chars, {part}" for part in ("low", "median", "p95", "high")]


def numbers_of(rows: Sequence[Row], task: Task) -> dict[str, int]:
    """Return {name: number} of a file with at least one row.

    Each label of the task has the number of its rows. The characters are those of all messages of a
    prompt, without the chat template: the lowest value, the lower median, the 95th percentile
    (nearest rank) and the highest value. A repeated problem is a row that asks what an earlier one
    asks.
    """
    labels = Counter(
        label for row in rows for label in task.labels(row["reward_model"]["ground_truth"])
    )
    chars = [sum(len(message["content"]) for message in row["prompt"]) for row in rows]
    spread = np.quantile(chars, (0, 0.5, 0.95, 1), method="inverted_cdf").tolist()
    return {
        "rows": len(rows),
        **{label: labels[label] for label in sorted(labels)},
        **dict(zip(CHARS, spread, strict=True)),
        "repeated problems": len(rows) - len({question_of(row) for row in rows}),
    }


def overlap(splits: Splits) -> list[int]:
    """Return the numbers of the test rows that ask what a training row asks."""
    train = {question_of(row) for row in splits["train"]}
    return [number for number, row in enumerate(splits["test"]) if question_of(row) in train]


def table(splits: Splits, task: Task) -> str:
    """Return a table with one column per file; the last line is the overlap."""
    columns = [numbers_of(rows, task) for rows in splits.values()]
    labels = {name for column in columns for name in column} - {"rows", *CHARS, "repeated problems"}
    names = ("rows", *sorted(labels), *CHARS, "repeated problems")
    lines = [f"{name:24}" + "".join(f"{c.get(name, 0):>12,}" for c in columns) for name in names]
    head = f"{'':24}" + "".join(f"{split:>12}" for split in splits)
    return "\n".join([head, *lines, f"{'test problems in train':24}{len(overlap(splits)):>24,}"])
