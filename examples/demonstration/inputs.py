"""The rows, and a tiny Qwen2 that has seen answers of which half of the words are right.

A row asks for the animal of a place, such as "Which animal lives in the forest?". An answer has six
words with four choices each. In an answer that the policy is shown, each word is the right one with
probability 1/2. So the format is right in 1 of 8 answers at the start, and the judge gives 50.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from examples.demonstration.rewards import FRAME, WORDS
from verl_gdpo.tasks.constraints.rows import KEYWORDS, TOPICS
from verl_gdpo.tasks.preparation.schema import SCHEMA
from workshop.tiny_policy.model import TURN_END, make_tiny_model

# the first choice of the frame's words is the right one; of the others, a row has its own
CHOICES = (
    (FRAME[0], "answer:", "well", "so"),
    ("big", "small", "old", "young"),
    ("red", "blue", "grey", "white"),
    ("fox", "bear", "frog", "owl"),
    (FRAME[1], ";", "end", "then"),
    (FRAME[2], "!", "?", "~"),
)
QUESTION = "Which animal lives in the "
PLACES = (
    *("forest", "river", "desert", "valley", "garden", "meadow", "jungle", "harbour"),
    *("swamp", "tower", "cave", "barn", "park", "lake", "attic", "mill"),
)
STEPS, BATCH, RATE = 300, 64, 3e-3  # of the supervised training
# of the real model
PROMPTS = 32
NUMBERS_OF_WORDS = (6, 7, 8, 9, 10)

Row = dict[str, Any]


def make_rows(seed: int) -> list[Row]:
    """Return a row for each place in verl's schema; the seed says which animal lives there."""
    chance = random.Random(seed)
    return [
        {
            "data_source": "demonstration",
            "prompt": [{"role": "user", "content": f"{QUESTION}{place}?"}],
            "ability": "demonstration",
            "reward_model": {
                "style": "rule",
                "ground_truth": " ".join(map(chance.choice, CHOICES[1 : 1 + WORDS])),
            },
            "extra_info": {"index": index, "split": "train"},
        }
        for index, place in enumerate(PLACES)
    ]


def imperfect_answer(row: Row, chance: random.Random) -> str:
    """Return an answer with the right word in half of the places, and any other elsewhere."""
    right = [FRAME[0], *row["reward_model"]["ground_truth"].split(), *FRAME[1:]]
    return " ".join(
        word if chance.random() < 0.5 else chance.choice([c for c in choices if c != word])
        for word, choices in zip(right, CHOICES, strict=True)
    )


def make_inputs(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write rows and policy, and return their places.

    Raises:
        FileExistsError: the policy is there.
    """
    rows, policy = make_rows(seed), folder / "policy"
    file = write_rows(folder, rows)
    make_policy(policy, rows, seed)
    return file, policy


def write_rows(folder: Path, rows: Sequence[Row]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), file)
    return file


def make_prompts(folder: Path, seed: int) -> Path:
    """Write prompts for a real model, which ask for a sentence, and return their place."""
    chance = random.Random(seed)
    rows = []
    for index in range(PROMPTS):
        words = [chance.choice(TOPICS), chance.choice(KEYWORDS)]
        number = chance.choice(NUMBERS_OF_WORDS)
        wish = f"Use the words {words[0]} and {words[1]} in a sentence of {number} words."
        asked = {"number": number, "words": words}
        rows.append(
            {
                "data_source": "sentences",
                "prompt": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": wish},
                ],
                "ability": "sentences",
                "reward_model": {"style": "rule", "ground_truth": json.dumps(asked)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    return write_rows(folder, rows)


def make_policy(folder: Path, rows: Sequence[Row], seed: int, steps: int = STEPS) -> None:
    """Write the policy into a new folder; the same arguments on the same machine give it again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a bar for each of three tiny files
    chance, words = random.Random(seed), [word for choices in CHOICES for word in choices]
    # the space belongs to the word after it
    whole = [QUESTION, *PLACES, *(f" {word}" for word in words), *CHOICES[0]]
    make_tiny_model(
        folder,
        texts=[QUESTION, *PLACES, *words],
        whole_tokens=sorted(whole, key=len, reverse=True),
        hidden_size=64,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.05,
        seed=seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, tokenize=False
    )
    for _ in range(steps):
        numbers = [chance.randrange(len(rows)) for _ in range(BATCH)]
        answers = [imperfect_answer(rows[k], chance) + TURN_END for k in numbers]
        asked = torch.tensor(tokenizer([prompts[k] for k in numbers])["input_ids"])
        input_ids = torch.cat([asked, torch.tensor(tokenizer(answers)["input_ids"])], dim=1)
        labels = torch.cat([torch.full_like(asked, -100), input_ids[:, asked.shape[1] :]], dim=1)
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
