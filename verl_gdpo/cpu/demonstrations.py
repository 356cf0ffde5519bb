"""Demonstrations for the warm start: rows as token sequences, with bad habits.

Knows neither the model nor files other than the rows' own.
"""

import os
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from verl_gdpo.cpu.tiny_model import TURN_END
from verl_gdpo.rewards import TASK_OF
from verl_gdpo.rewards.tool_rl_format import THINK_CLOSE

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

Example = tuple[list[int], int]  # prompt and answer in tokens, length of the prompt


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
    return TASK_OF[row["data_source"]].good_response(row["reward_model"]["ground_truth"])


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


def batches_of(
    rows: Sequence[dict[str, Any]], tokenizer: Any, batch_size: int, rng: random.Random
) -> Iterator[list[Example]]:
    """Endless batches, each of rows of about one length, with fresh habits on every pass."""
    messages = [row["prompt"] for row in rows]
    texts = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompts: list[list[int]] = tokenizer(texts)["input_ids"]
    order: list[int] = []
    while True:
        while len(order) < batch_size * POOL_BATCHES:
            order += rng.sample(range(len(rows)), len(rows))
        pool, order = order[: batch_size * POOL_BATCHES], order[batch_size * POOL_BATCHES :]
        answers = tokenizer([imperfect(answer_of(rows[i]), rng) + TURN_END for i in pool])
        examples = [
            (prompts[i] + answer, len(prompts[i]))
            for i, answer in zip(pool, answers["input_ids"], strict=True)
        ]
        examples.sort(key=lambda example: len(example[0]))
        longest = len(examples[-1][0])
        if longest > MAX_TOKENS:
            raise ValueError(
                f"warm start, data: got a prompt plus answer of {longest} tokens; expected at most "
                f'{MAX_TOKENS}, such as rows of data_prep.tool_rl_synthetic in size "tiny"'
            )
        starts = range(0, len(examples), batch_size)
        yield from (examples[k : k + batch_size] for k in rng.sample(starts, len(starts)))
