"""Demonstrations for the warm start: rows as token sequences, with bad habits.

Knows neither the model nor files other than the rows' own.
"""

import os
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from verl_gdpo.tasks import TASK_BY_SOURCE
from verl_gdpo.tasks.tool_rl.form import THINK_CLOSE
from workshop.tiny_policy.model import TURN_END

# share of the demonstrations, pattern, replacement: what goes wrong in them, independently
HABITS = (
    (0.55, re.compile(f"{THINK_CLOSE}\n"), f"{THINK_CLOSE} "),  # breaks the format
    (0.60, re.compile(r'": (\d+)'), r'": "\1"'),  # numbers in quotes: wrong values
    (0.30, re.compile(r"\}\}\n"), "}\n"),  # no closing brace: not JSON, correctness -3
)
# pieces of prompts and answers that become one token: halves the sequences
WHOLE_TOKENS = (
    *("Tools:\n", ' {"', '": "string", "', '": "integer", "', '": "string"}', '": "integer"}'),
    *(': "', '" is "', '" is ', '", "', ', "', "; ", '"; '),
    *("<think> ", " </think>\n", " </think> ", "<tool_call>\n", "</tool_call>"),
    *("<response> ", " </response>", '{"name": "', '", "parameters": {"', '": "', '": '),
    *('"}}\n', "}}\n", '"}\n', "}\n"),
)
MAX_TOKENS = 256  # longest prompt plus answer
POOL_BATCHES = 16  # batches are cut from as many batches' rows, sorted by length


def load_rows(data: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the prompts and ground truths of a parquet file in verl's schema."""
    import pandas as pd

    frame = pd.read_parquet(data, columns=["data_source", "prompt", "reward_model"])
    return [
        {"data_source": source, "prompt": [*map(dict, prompt)], "reward_model": dict(reward_model)}
        for source, prompt, reward_model in frame.itertuples(index=False)
    ]


def answer_of(row: dict[str, Any]) -> str:
    """Return the row's good answer, as its task says."""
    return TASK_BY_SOURCE[row["data_source"]].good_response(row["reward_model"]["ground_truth"])


def texts_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is left of the rows' texts between the whole tokens."""
    longest_first = sorted(WHOLE_TOKENS, key=len, reverse=True)
    pieces = re.compile("|".join(map(re.escape, longest_first)))
    texts = [m["content"] for row in rows for m in row["prompt"]] + [answer_of(row) for row in rows]
    return [piece for text in texts for piece in pieces.split(text) if piece]


def imperfect(answer: str, rng: random.Random) -> str:
    """Return the answer with each of the `HABITS` or without it, as the dice fall."""
    for share, pattern, replacement in HABITS:
        if rng.random() < share:
            answer = pattern.sub(replacement, answer)
    return answer


class Demonstrations:
    """Prompts with imperfect answers in tokens, out of rows in verl's schema."""

    def __init__(self, rows: Sequence[dict[str, Any]], tokenizer: Any, rng: random.Random) -> None:
        messages = [row["prompt"] for row in rows]
        texts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        self._prompts: list[list[int]] = tokenizer(texts)["input_ids"]
        self._answers = [answer_of(row) for row in rows]
        self._tokenizer, self._rng = tokenizer, rng

    def example(self, row: int) -> dict[str, list[int]]:
        """Return `input_ids` and `labels`, -100 in the prompt; each time with other habits.

        Raises:
            ValueError: more than `MAX_TOKENS`.
        """
        prompt, answer = self._prompts[row], imperfect(self._answers[row], self._rng)
        answer_ids: list[int] = self._tokenizer(answer + TURN_END)["input_ids"]
        length = len(prompt) + len(answer_ids)
        if length > MAX_TOKENS:
            raise ValueError(
                f"warm start, data, row {row}: got a prompt plus answer of {length} tokens; "
                f"expected at most {MAX_TOKENS}, as in the rows of: verl-gdpo data tool_rl "
                "--synthetic"
            )
        return {"input_ids": prompt + answer_ids, "labels": [-100] * len(prompt) + answer_ids}

    def batches(self, batch_size: int) -> Iterator[list[dict[str, list[int]]]]:
        """Endless batches, each of examples of about one length, in random order.

        transformers' LengthGroupedSampler goes from long to short again and again; trained like
        that for 1,000 steps, the policy does not learn to copy.
        """
        rows = range(len(self._prompts))
        order: list[int] = []
        while True:
            while len(order) < batch_size * POOL_BATCHES:
                order += self._rng.sample(rows, len(rows))
            pool, order = order[: batch_size * POOL_BATCHES], order[batch_size * POOL_BATCHES :]
            examples = sorted(map(self.example, pool), key=lambda shown: len(shown["input_ids"]))
            for k in self._rng.sample(range(POOL_BATCHES), POOL_BATCHES):
                yield examples[k * batch_size : (k + 1) * batch_size]
