"""Synthetic tool-calling rows in ToolRL's format, made from a seed without any download.

There are two sizes. "full" is for an instruct model: each prompt describes several tools with typed
parameters, and the request is in English. "tiny" is for the CPU policy of
`workshop.tiny_policy`: names, keys and values combine a hundred short words, and prompts and
answers have at most about 70 tokens of that policy's tokenizer. In both sizes, the train split
never shows the tools (names and sets of parameter names) and values of the test split, except for
true and false.

A tiny row, with the prompt and the right answer:

    Tools:
    sell_boat {"city": "string", "size": "integer"}
    find_lamp {"rank": "integer", "team": "string"}
    --
    find_lamp: "rank" is 46, "team" is "red-fox"
    --
    <think> one call </think>
    <tool_call>
    {"name": "find_lamp", "parameters": {"rank": 46, "team": "red-fox"}}
    </tool_call>
"""

import json
from collections.abc import Sequence
from random import Random
from typing import Any, Literal, get_args

from verl_gdpo.data_prep.tool_rl_synthetic_pool import (
    TOOLS,
    Split,
    Value,
    draw_value,
    fill_request,
    words,
)
from verl_gdpo.rewards.tool_rl import TASK
from verl_gdpo.rewards.tool_rl_format import compact_system_prompt, render_answer, system_prompt

Size = Literal["tiny", "full"]
DATA_SOURCE = TASK.data_sources[0]
RESPONSE_SHARE = 0.1  # share of rows that ask for a response without a call
CALL_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}  # {number of calls: share of the other rows}
COUNT_WORDS = {1: "one call", 2: "two calls", 3: "three calls"}

VERBS = words("find book send make move open sell read sort lock wash mix")
NOUNS = words("room lamp boat card desk song file gate seed coat path jar")
TEXT_KEYS = words("city team item kind shop road user part")
INTEGER_KEYS = words("size rank days cost page row age level")
HEADS = words("red blue dark old tall soft wild cold deep thin gold warm dry big calm pale")
TAILS = words("fox owl oak sun hill lake rock wolf star leaf moon crow reed pond wind bear")
FIRST_DIGITS, LAST_DIGITS = "123456789", "0123456789"
TINY_WORDS = (*VERBS, *NOUNS, *TEXT_KEYS, *INTEGER_KEYS, *HEADS, *TAILS)
TEST_EVERY = 4  # every fourth combination of two words or two digits is for the test split

_Call = dict[str, Any]
# (system prompt, request, thought, calls, response text)
_Parts = tuple[str, str, str, list[_Call], str | None]


def make_rows(count: int, *, split: Split, seed: int, size: Size = "full") -> list[dict[str, Any]]:
    """Return rows in verl's schema, with the data source "rlla".

    As a response, each ground truth scores format 1 and correctness 3. About a tenth of the rows
    ask for a response without a call; their correctness is 0. Row i only depends on i, seed, split
    and size, so a larger count adds rows and keeps the others.

    Args:
        count: number of rows, at least 1.
        split: "train" or "test". The splits have different tools and values.
        seed: integer, at least 0.
        size: "full" or "tiny".

    Raises:
        ValueError: an argument is out of range.
    """
    for name, value, choices in (
        ("split", split, get_args(Split)),
        ("size", size, get_args(Size)),
    ):
        if value not in choices:
            raise ValueError(f"synthetic rows, {name}: got {value!r}; expected one of {choices}")
    for name, number, least in (("count", count, 1), ("seed", seed, 0)):
        if number < least:
            raise ValueError(f"synthetic rows, {name}: got {number}; expected at least {least}")
    return [_row(index, split, seed, size) for index in range(count)]


def _row(index: int, split: Split, seed: int, size: Size) -> dict[str, Any]:
    # Random hashes a string seed with SHA-512, which is the same in every process, unlike hash().
    rng = Random(f"verl-gdpo synthetic {size} {split} {seed} {index}")
    calls = 0
    if rng.random() >= RESPONSE_SHARE:
        calls = rng.choices(list(CALL_WEIGHTS), list(CALL_WEIGHTS.values()))[0]
    make_parts = _tiny_parts if size == "tiny" else _full_parts
    system, request, thought, gold_calls, response = make_parts(calls, split, rng)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "system", "content": system},
            {"role": "user", "content": request},
        ],
        "ability": "tool_calling",
        "reward_model": {
            "style": "rule",
            "ground_truth": render_answer(thought, gold_calls, response),
        },
        "extra_info": {
            "index": index,
            "split": split,
            "kind": "tool" if calls else "response",
            "calls": calls,
        },
    }


# --- full size -----------------------------------------------------------------------------------


def _full_parts(calls: int, split: Split, rng: Random) -> _Parts:
    offered = rng.sample(TOOLS[split], rng.randint(max(3, calls), 6))
    system = system_prompt([tool for tool, _ in offered])
    if not calls:
        return system, *_full_response(split, rng)
    requests, gold_calls = [], []
    for tool, template in rng.sample(offered, calls):
        request, parameters = fill_request(template, split, rng)
        requests.append(request)
        gold_calls.append({"name": tool["name"], "parameters": parameters})
    names = " and ".join(call["name"] for call in gold_calls)
    thought = f"The request asks for {COUNT_WORDS[calls]}, of {names}; all values are given."
    return system, _sentence(requests, rng), thought, gold_calls, None


def _sentence(requests: Sequence[str], rng: Random) -> str:
    first, *rest = requests
    opening, close = rng.choice(
        [("Please", "."), ("Could you", "?"), ("I need you to", "."), ("Can you", ", please?")]
    )
    joined = ", then ".join([first, *rest[:1]]) + "".join(f", and finally {r}" for r in rest[1:])
    return f"{opening} {joined}{close}"


def _full_response(split: Split, rng: Random) -> tuple[str, str, list[_Call], str]:
    person, topic = draw_value("person", split, rng), draw_value("topic", split, rng)
    request, response = rng.choice(
        [
            (f"No tool is needed now. Just say goodbye to {person}.", f"Goodbye, {person}!"),
            (
                f"Do not call a tool. Only confirm that we will talk about {topic} next time.",
                f"Agreed, we will talk about {topic} next time.",
            ),
            (
                f"Thanks, that was all, nothing to run. Reply with a short thank-you to {person}.",
                f"Thank you, {person}!",
            ),
        ]
    )
    return request, "The request rules out tools and wants a short reply.", [], response


# --- tiny size -----------------------------------------------------------------------------------


def _tiny_parts(calls: int, split: Split, rng: Random) -> _Parts:
    names: list[str] = []
    while len(names) < max(2, calls):
        name = _combination(VERBS, NOUNS, "_", split, rng)
        if name not in names:
            names.append(name)
    tools: list[dict[str, Any]] = [
        {"name": name, "parameters": _tiny_signature(split, rng)} for name in names
    ]
    system = compact_system_prompt(tools)
    if not calls:
        word = _combination(HEADS, TAILS, "-", split, rng)
        return system, f'no tool, just say "{word}"', "no call", [], word
    gold_calls = [
        {
            "name": tool["name"],
            "parameters": {
                key: _tiny_value(schema["type"], split, rng)
                for key, schema in tool["parameters"].items()
            },
        }
        for tool in rng.sample(tools, calls)
    ]
    request = "; ".join(_tiny_request(call) for call in gold_calls)
    return system, request, COUNT_WORDS[calls], gold_calls, None


def _tiny_request(call: _Call) -> str:
    values = ", ".join(f'"{k}" is {json.dumps(v)}' for k, v in call["parameters"].items())
    return f"{call['name']}: {values}"


def _tiny_signature(split: Split, rng: Random) -> dict[str, dict[str, str]]:
    text_key, integer_key = _combination(TEXT_KEYS, INTEGER_KEYS, " ", split, rng).split()
    pair = [(text_key, {"type": "string"}), (integer_key, {"type": "integer"})]
    return dict(pair if rng.random() < 0.5 else pair[::-1])


def _tiny_value(kind: str, split: Split, rng: Random) -> Value:
    if kind == "string":
        return _combination(HEADS, TAILS, "-", split, rng)
    return int(_combination(FIRST_DIGITS, LAST_DIGITS, "", split, rng))


def _combination(
    lefts: Sequence[str], rights: Sequence[str], link: str, split: Split, rng: Random
) -> str:
    """Return two linked words; the places of both words decide which split may use the pair."""
    while True:
        left, right = rng.randrange(len(lefts)), rng.randrange(len(rights))
        if ((left + right) % TEST_EVERY == TEST_EVERY - 1) == (split == "test"):
            return f"{lefts[left]}{link}{rights[right]}"
