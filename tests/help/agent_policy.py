"""A tiny policy that asks one of two tools, which the supervised steps of a minute teach it.

It knows a few sums by heart, and has bad habits: it takes the other tool, answers at once, leaves
out the tags or says more than it has to. So each reward of docs/thinking_models.md varies within a
group.
"""

import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

from workshop.tiny_policy.model import TURN_END, make_tiny_model

NUMBERS = [(2, 3), (4, 5), (6, 7), (8, 9)]
WORDS = {"add": "plus", "multiply": "times"}
LONG = "so I think and I think that "


def result_of(tool, a, b):
    return a + b if tool == "add" else a * b


def question(tool, a, b):
    return f"What is {a} {WORDS[tool]} {b}?"


def questions():
    """(tool, a, b) of each question that the policy knows."""
    return [(tool, a, b) for a, b in NUMBERS for tool in WORDS]


def row(number, split):
    """A row in verl's form."""
    tool, a, b = questions()[number % len(questions())]
    return {
        "data_source": "sums",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": question(tool, a, b)}],
        "reward_model": {"style": "rule", "ground_truth": str(result_of(tool, a, b))},
        "extra_info": {"split": split, "index": number},
    }


def call_of(tool, a, b):
    call = json.dumps({"name": tool, "arguments": {"a": a, "b": b}})
    return f"<tool_call>\n{call}\n</tool_call>"


def told(result):
    """What stands between two turns of the policy, in verl's continuous tokens."""
    return f"\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"


def demonstration(tool, a, b, dice):
    """[(text, whether the policy writes it)] behind the prompt."""
    if dice.random() < 0.2:
        # It guesses, without a tool.
        guess = result_of(tool, a, b) if dice.random() < 0.5 else 0
        return [(f"<answer>{guess}</answer>{TURN_END}", True)]
    if dice.random() < 0.3:
        tool = "multiply" if tool == "add" else "add"
    result = result_of(tool, a, b)
    answer = f"<answer>{result}</answer>"
    if dice.random() < 0.3:
        answer = f"It is {result}."
    if dice.random() < 0.3:
        answer = LONG + answer
    return [
        (call_of(tool, a, b) + TURN_END, True),
        (told(result), False),
        (answer + TURN_END, True),
    ]


def make_agent_policy(folder, *, steps=250, batch_size=16, seed=0):
    """Write model and tokenizer into a new folder."""
    dice = random.Random(seed)
    texts = [LONG, "It is .", "<answer></answer>", "tool\n"]
    for each in questions():
        texts += [question(*each), call_of(*each), str(result_of(*each))]
    make_tiny_model(folder, texts=texts, vocab_size=400, num_key_value_heads=4, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    padded = DataCollatorForSeq2Seq(tokenizer)
    for _ in range(steps):
        batch = [example(tokenizer, dice.choice(questions()), dice) for _ in range(batch_size)]
        loss = model(**padded(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def example(tokenizer, each, dice):
    """Return `input_ids` and `labels`, which are -100 where the policy does not write."""
    messages = [{"role": "user", "content": question(*each)}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    input_ids = list(tokenizer(prompt)["input_ids"])
    labels = [-100] * len(input_ids)
    for text, is_own in demonstration(*each, dice):
        ids = tokenizer(text)["input_ids"]
        input_ids += ids
        labels += ids if is_own else [-100] * len(ids)
    return {"input_ids": input_ids, "labels": labels}
