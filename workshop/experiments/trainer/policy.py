"""The starting policy: a tiny Qwen2 that was shown responses which are half right.

Reinforcement learning needs a policy that is sometimes right. In a demonstration, each place has
the wanted choice with probability 1/2, so the policy meets each reward in about 1 of 8 responses.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl_gdpo.cpu.sampler import Completion, Request, SamplingParams, sample
from workshop.experiments.trainer.task import NAMES, OF_REWARD, PLACES, Row, demonstration, met
from workshop.tiny_policy.model import TURN_END, make_tiny_model

STEPS, BATCH, RATE = 300, 64, 3e-3
RESPONSE_TOKENS = 12  # a good response has 7


def make_policy(folder: Path, rows: Sequence[Row], seed: int) -> None:
    """Write a policy into a new folder; the same arguments on the same machine give it again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chance = random.Random(seed)
    words = [word for place in PLACES for word in place]
    # the space belongs to the word after it
    whole = [*NAMES, *(f" {word}" for word in words), *PLACES[0]]
    make_tiny_model(
        folder,
        texts=[*NAMES, *words],
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
    for _ in range(STEPS):
        shown = [chance.choice(rows) for _ in range(BATCH)]
        answers = [tokenizer(demonstration(row, chance) + TURN_END)["input_ids"] for row in shown]
        prompts = [_prompt_ids(tokenizer, row) for row in shown]
        input_ids = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
        labels = input_ids.clone()
        labels[:, : len(prompts[0])] = -100
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _prompt_ids(tokenizer: Any, row: Row) -> list[int]:
    text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text)["input_ids"])


def start_rates(folder: Path, rows: Sequence[Row], samples: int = 16) -> dict[str, float]:
    """Return the share of responses that meet each reward, with `samples` for each row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    params = SamplingParams(stop_ids=frozenset([tokenizer.eos_token_id]))
    asked = [row for row in rows for _ in range(samples)]
    requests = [
        Request(_prompt_ids(tokenizer, row), params, RESPONSE_TOKENS, seed=k)
        for k, row in enumerate(asked)
    ]
    with torch.inference_mode():
        completions = sample(model, requests, tokenizer.pad_token_id)
    is_met = {reward: 0 for reward in OF_REWARD}
    for row, completion in zip(asked, completions, strict=True):
        assert isinstance(completion, Completion)  # a policy of ours has finite logits
        response = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        wanted = json.loads(row["reward_model"]["ground_truth"])
        for reward in OF_REWARD:
            is_met[reward] += met(response, reward, wanted[reward])
    return {reward: count / len(asked) for reward, count in is_met.items()}
