"""Computes numbers about checked rows, to look at before training."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verl_gdpo.data_prep import DataError
from verl_gdpo.data_prep.problems import question_of
from verl_gdpo.data_prep.progress import Progress
from verl_gdpo.data_prep.schema import Row, Splits
from verl_gdpo.rewards.task import Task

CountTokens = Callable[[list[dict[str, str]]], int]


@dataclass(frozen=True)
class Spread:
    """The lowest value, the lower median, the 95th percentile (nearest rank), the highest value."""

    low: int
    median: int
    p95: int
    high: int


@dataclass(frozen=True)
class FileReport:
    """The numbers of one file.

    labels: {label of the task: number of rows that have it}.
    prompt_chars: characters in all messages of a prompt, without the chat template.
    prompt_tokens: tokens of a prompt with the chat template, as verl counts them. None without a
        tokenizer.
    repeated: number of rows that ask what an earlier row of the file asks.
    """

    rows: int
    labels: Mapping[str, int]
    prompt_chars: Spread
    prompt_tokens: Spread | None
    repeated: int


def summarise(
    rows: Sequence[Row], task: Task, count_tokens: CountTokens | None = None
) -> FileReport:
    """Return the numbers of a file with at least one row."""
    ground_truths = [row["reward_model"]["ground_truth"] for row in rows]
    prompts = [row["prompt"] for row in rows]
    return FileReport(
        rows=len(rows),
        labels=Counter(label for text in ground_truths for label in task.labels(text)),
        prompt_chars=_spread([sum(len(m["content"]) for m in prompt) for prompt in prompts]),
        prompt_tokens=_spread(_count_all(prompts, count_tokens)) if count_tokens else None,
        repeated=len(rows) - len({question_of(row) for row in rows}),
    )


def overlap(splits: Splits) -> list[int]:
    """Return the numbers of the test rows that ask what a training row asks."""
    train = {question_of(row) for row in splits["train"]}
    return [number for number, row in enumerate(splits["test"]) if question_of(row) in train]


def token_counter(folder: Path) -> CountTokens:
    """Return a function that counts a prompt's tokens as verl does, with the chat template.

    The returned function raises DataError if the chat template refuses the prompt.

    Args:
        folder: folder of a tokenizer that transformers saved. Nothing is downloaded.

    Raises:
        DataError: the folder does not exist, transformers cannot load it, or it has no chat
            template.
    """
    if not folder.is_dir():
        raise DataError(f"tokenizer {folder}: got no folder there; expected a saved tokenizer")
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.get_chat_template()
    except Exception as error:  # a damaged file makes the tokenizers library raise plain Exception
        raise DataError(f"tokenizer {folder}: got no usable one: {error}") from error

    def count(prompt: list[dict[str, str]]) -> int:
        try:
            tokens = tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template is a program and may raise anything
            raise DataError(
                f"tokenizer {folder}: its chat template refuses {repr(prompt)[:200]}: {error}"
            ) from error
        return len(tokens)

    return count


def table(splits: dict[str, FileReport], shared_rows: int) -> str:
    """Return a table with one column per file; the last line is the overlap."""
    reports = list(splits.values())
    lines: list[tuple[str, list[Any]]] = [("rows", [r.rows for r in reports])]
    for label in sorted({label for r in reports for label in r.labels}):
        lines.append((label, [r.labels.get(label, 0) for r in reports]))
    for unit in ("chars", "tokens"):
        spreads = [getattr(r, f"prompt_{unit}") for r in reports]
        for part in ("low", "median", "p95", "high") if all(spreads) else ():
            lines.append((f"prompt {unit}, {part}", [getattr(s, part) for s in spreads]))
    lines.append(("repeated problems", [r.repeated for r in reports]))
    head = f"{'':24}" + "".join(f"{name:>12}" for name in splits)
    body = [f"{label:24}" + "".join(f"{value:>12,}" for value in values) for label, values in lines]
    return "\n".join([head, *body, f"{'test problems in train':24}{shared_rows:>24,}"])


def _count_all(prompts: Sequence[list[dict[str, str]]], count_tokens: CountTokens) -> list[int]:
    progress = Progress("counting tokens", len(prompts), "prompts")
    counts = []
    for number, prompt in enumerate(prompts):
        progress.at(number)
        counts.append(count_tokens(prompt))
    return counts


def _spread(values: list[int]) -> Spread:
    return Spread(*np.quantile(values, (0, 0.5, 0.95, 1), method="inverted_cdf").tolist())
