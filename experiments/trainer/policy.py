"""The starting policy: a tiny Qwen2 that answers in the form of the task, and picks at random."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.trainer.task import NAMES, OF_REWARD, PLACES, any_response, met
from verl_gdpo.cpu.sampler import Request, sample
from verl_gdpo.cpu.sampling_params import SamplingParams
from verl_gdpo.cpu.tiny_model import TURN_END, make_tiny_model

STEPS, BATCH, RATE = 150, 64, 3e-3
WORDS = tuple(word for place in PLACES for word in place)


def make_policy(folder: Path, seed: int = 0) -> Path:
    """Train the policy on responses with random choices, and write it into a new folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    chance = random.Random(seed)
    # a space belongs to the word after it, and a word may open a response
    whole = sorted((*(f" {word}" for word in WORDS[2:]), *WORDS[:2], *NAMES), key=len, reverse=True)
    make_tiny_model(
        folder,
        texts=[*NAMES, *WORDS],
        whole_tokens=whole,
        hidden_size=64,
        num_key_value_heads=4,
        max_position_embeddings=64,
        seed=seed,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        shown = [(chance.choice(NAMES), any_response(chance)) for _ in range(BATCH)]
        input_ids = torch.tensor([prompt_ids(tokenizer, n) + _ids(tokenizer, r) for n, r in shown])
        labels = input_ids.clone()
        labels[:, : -len(PLACES) - 1] = -100
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def prompt_ids(tokenizer: Any, name: str) -> list[int]:
    messages = [{"role": "user", "content": name}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text)["input_ids"])


def _ids(tokenizer: Any, response: str) -> list[int]:
    return list(tokenizer(response + TURN_END)["input_ids"])


def start_rates(folder: Path, rows: Sequence[dict[str, Any]], samples: int) -> dict[str, float]:
    """Return the share of responses that meet each reward, with `samples` for each row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    params = SamplingParams(stop_ids=frozenset([tokenizer.eos_token_id]))
    asked = [row for row in rows for _ in range(samples)]
    requests = [
        Request(prompt_ids(tokenizer, row["prompt"][0]["content"]), params, 12, seed=k)
        for k, row in enumerate(asked)
    ]
    with torch.inference_mode():
        answers = sample(model, requests, tokenizer.pad_token_id)
    texts = [tokenizer.decode(a.token_ids, skip_special_tokens=True) for a in answers]
    wanted = [json.loads(row["reward_model"]["ground_truth"]) for row in asked]
    return {
        reward: sum(met(t, reward, w[reward]) for t, w in zip(texts, wanted, strict=True))
        / len(texts)
        for reward in OF_REWARD
    }
