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

`tool_rl_synthetic.json` has the words, and the tools of full size. The slots of a tool's request
are the tool's parameters, in order:

    {city:city}              key and kind of value, see `KINDS`
    {unit=celsius|kelvin}    a string, one of these
    {gift?with|without}      a boolean: the text for true, the text for false
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from verl_gdpo.data_prep.local_files import make_row
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.rewards.tool_rl import TASK
from verl_gdpo.rewards.tool_rl_format import compact_system_prompt, render_answer, system_prompt

Size = Literal["tiny", "full"]
Split = Literal["train", "test"]
Value = str | int | float | bool
RESPONSE_SHARE = 0.1  # share of rows that ask for a response without a call
CALL_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}  # {number of calls: share of the other rows}
COUNT_WORDS = {1: "one call", 2: "two calls", 3: "three calls"}
WORDS = json.loads(Path(__file__).with_suffix(".json").read_text())

_Call = dict[str, Any]
# (system prompt, request, thought, calls, response text)
_Parts = tuple[str, str, str, list[_Call], str | None]


def make_rows(count: int, *, split: Split, seed: int, size: Size = "full") -> list[Row]:
    """Return rows in verl's schema, with the data source "rlla".

    As a response, each ground truth scores format 1 and correctness 3. About a tenth of the rows
    ask for a response without a call; their correctness is 0. Row i only depends on i, seed, split
    and size, so a larger count adds rows and keeps the others.

    Args:
        count: number of rows, at least 1.
        split: "train" or "test". The splits have different tools and values.
        seed: integer, at least 0.
        size: "full" or "tiny".
    """
    return [_row(index, split, seed, size) for index in range(count)]


def _row(index: int, split: Split, seed: int, size: Size) -> Row:
    # Random hashes a string seed with SHA-512, which is the same in every process, unlike hash().
    rng = Random(f"verl-gdpo synthetic {size} {split} {seed} {index}")
    calls = 0
    if rng.random() >= RESPONSE_SHARE:
        calls = rng.choices(list(CALL_WEIGHTS), list(CALL_WEIGHTS.values()))[0]
    make_parts = {"tiny": _tiny_parts, "full": _full_parts}[size]
    system, request, thought, gold_calls, response = make_parts(calls, split, rng)
    answer = render_answer(thought, gold_calls, response)
    kind = {"kind": "tool" if calls else "response", "calls": calls}
    row = make_row(TASK, request, answer, system, ability="tool_calling")
    return {**row, "extra_info": {"index": index, "split": split, **kind}}


# full size

SLOT = re.compile(r"\{(\w+)([:=?])([^}]*)\}")
VALUE_TEST_EVERY = 5  # every fifth value of a kind is for the test split
TYPES = {str: "string", int: "integer", float: "number"}
FIRST, LAST = WORDS["first_names"], WORDS["last_names"]
# {kind: values of one type}
KINDS: dict[str, list[Value]] = {
    **WORDS["values"],
    "person": [f"{first} {last}" for last in LAST for first in FIRST],
    "email": [
        f"{first}.{last}@{domain}".lower()
        for domain in WORDS["domains"]
        for last in LAST
        for first in FIRST
    ],
    "date": [f"2027-{month:02d}-{day:02d}" for month in range(1, 13) for day in range(1, 29)],
    "time": [f"{hour:02d}:{ten}5" for hour in range(24) for ten in range(6)],
    "code": [f"{'KQRTVX'[i % 6]}{'BDFGHM'[i // 6 % 6]}-{1000 + i}" for i in range(9000)],
    # integers are split by value, so that a value of one split never occurs in the other split
    "few": [*range(15)],
    "many": [*range(500)],
    # never whole numbers, so that no number equals an integer
    "amount": [round(10 + i // 5 + (i % 5 * 10 + 25) / 100, 2) for i in range(4990)],
}


def _full_parts(calls: int, split: Split, rng: Random) -> _Parts:
    offered = rng.sample(TOOLS[split], rng.randint(max(3, calls), 6))
    system = system_prompt([tool for tool, _ in offered])
    if not calls:
        about = {kind: _value(kind, split, rng) for kind in ("person", "topic")}
        request, response = (text.format(**about) for text in rng.choice(WORDS["replies"]))
        thought = "The request rules out tools and wants a short reply."
        return system, request, thought, [], response
    requests, gold_calls = [], []
    for tool, template in rng.sample(offered, calls):
        request, parameters = _filled(template, split, rng)
        requests.append(request)
        gold_calls.append({"name": tool["name"], "parameters": parameters})
    names = " and ".join(call["name"] for call in gold_calls)
    thought = f"The request asks for {COUNT_WORDS[calls]}, of {names}; all values are given."
    return system, _sentence(requests, rng), thought, gold_calls, None


def _sentence(requests: Sequence[str], rng: Random) -> str:
    first, *rest = requests
    opening, close = rng.choice(WORDS["openings"])
    joined = ", then ".join([first, *rest[:1]]) + "".join(f", and finally {r}" for r in rest[1:])
    return f"{opening} {joined}{close}"


def _value(kind: str, split: Split, rng: Random) -> Value:
    values = KINDS[kind]
    block = rng.randrange(len(values) // VALUE_TEST_EVERY) * VALUE_TEST_EVERY
    place = VALUE_TEST_EVERY - 1 if split == "test" else rng.randrange(VALUE_TEST_EVERY - 1)
    if kind in ("few", "many") and block + place == 0:  # nobody asks for 0 of something
        place = 1
    return values[block + place]


def _filled(request: str, split: Split, rng: Random) -> tuple[str, dict[str, Value]]:
    """Return the request with filled slots, and the parameters that it asks for."""
    parameters: dict[str, Value] = {}

    def fill(slot: re.Match[str]) -> str:
        key, mark, text = slot.groups()
        if mark == ":":
            parameters[key] = _value(text, split, rng)
            return str(parameters[key])
        choices = text.split("|")
        chosen = rng.randrange(len(choices))
        parameters[key] = chosen == 0 if mark == "?" else choices[chosen]
        return choices[chosen]

    return SLOT.sub(fill, request), parameters


def _tool(name: str, purpose: str, request: str) -> dict[str, Any]:
    parameters = {key: _schema(mark, text) for key, mark, text in SLOT.findall(request)}
    return {"name": name, "description": purpose, "parameters": parameters}


def _schema(mark: str, text: str) -> dict[str, Any]:
    if mark == "=":
        return {"type": "string", "enum": text.split("|")}
    return {"type": "boolean" if mark == "?" else TYPES[type(KINDS[text][0])]}


# {split: (signature of a tool, request for it)}
TOOLS: dict[Split, list[tuple[dict[str, Any], str]]] = {
    split: [(_tool(name, **about), about["request"]) for name, about in tools.items()]
    for split, tools in WORDS["tools"].items()
}


# tiny size

WORD_TEST_EVERY = 4  # every fourth combination of two words or two digits is for the test split


def _tiny_parts(calls: int, split: Split, rng: Random) -> _Parts:
    names: list[str] = []
    while len(names) < max(2, calls):
        name = _combination("verbs", "nouns", "_", split, rng)
        if name not in names:
            names.append(name)
    tools: list[dict[str, Any]] = [
        {"name": name, "parameters": _tiny_signature(split, rng)} for name in names
    ]
    system = compact_system_prompt(tools)
    if not calls:
        word = _combination("heads", "tails", "-", split, rng)
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
    text_key, integer_key = _combination("text_keys", "integer_keys", " ", split, rng).split()
    pair = [(text_key, {"type": "string"}), (integer_key, {"type": "integer"})]
    return dict(pair if rng.random() < 0.5 else pair[::-1])


def _tiny_value(kind: str, split: Split, rng: Random) -> Value:
    if kind == "string":
        return _combination("heads", "tails", "-", split, rng)
    return int(_combination("first_digits", "last_digits", "", split, rng))


def _combination(first: str, second: str, link: str, split: Split, rng: Random) -> str:
    """Return two linked words; the places of both words decide which split may use the pair."""
    lefts, rights = WORDS["tiny"][first], WORDS["tiny"][second]
    while True:
        left, right = rng.randrange(len(lefts)), rng.randrange(len(rights))
        if ((left + right) % WORD_TEST_EVERY == WORD_TEST_EVERY - 1) == (split == "test"):
            return f"{lefts[left]}{link}{rights[right]}"
