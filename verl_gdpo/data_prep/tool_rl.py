"""Tool calling (ToolRL's rlla_4k): from upstream, from local files, or synthetic.

Upstream is github.com/qiancheng0/ToolRL (Apache-2.0) at a fixed commit.

Synthetic rows have two sizes. "full" is for an instruct model: each prompt describes several tools
with typed parameters, and the request is in English. "tiny" is for the CPU policy of
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

`tool_rl.json` has the words, and the tools of full size. The slots of a tool's request are the
tool's parameters, in order:

    {city:city}              key and kind of value, see `KINDS`
    {unit=celsius|kelvin}    a string, one of these
    {gift?with|without}      a boolean: the text for true, the text for false
"""

import json
import re
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from verl_gdpo.data_prep.local_files import make_row, numbered, seeded, strings_of
from verl_gdpo.data_prep.schema import Row
from verl_gdpo.data_prep.sources import Sources
from verl_gdpo.rewards.tool_rl import TASK
from verl_gdpo.rewards.tool_rl_format import compact_system_prompt, render_answer, system_prompt

COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
JSON_KEYS = ("instruction", "input", "output")

Size = Literal["tiny", "full"]
Split = Literal["train", "test"]
Value = str | int | float | bool
# (system prompt, request, thought, calls, response text)
Parts = tuple[str, str, str, list[dict[str, Any]], str | None]
RESPONSE_SHARE = 0.1  # share of rows that ask for a response without a call
CALL_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}  # {number of calls: share of the other rows}
COUNT_WORDS = {1: "one call", 2: "two calls", 3: "three calls"}
WORDS = json.loads(Path(__file__).with_suffix(".json").read_text())


def _row_of_item(item: Any, *_: Any) -> Row:
    fields = strings_of(item, JSON_KEYS)
    # upstream's parquet files have the ability "math", and our rows must be the same
    return make_row(TASK, fields["input"], fields["output"], fields["instruction"], ability="math")


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
    make_parts = _full_parts if size == "full" else _tiny_parts

    def row_of(rng: Random, split: Any) -> Row:
        calls = 0
        if rng.random() >= RESPONSE_SHARE:
            calls = rng.choices([*CALL_WEIGHTS], [*CALL_WEIGHTS.values()])[0]
        system, request, thought, gold_calls, response = make_parts(calls, split, rng)
        answer = render_answer(thought, gold_calls, response)
        row = make_row(TASK, request, answer, system, ability="tool_calling")
        return {**row, "extra_info": {"kind": "tool" if calls else "response", "calls": calls}}

    return numbered(seeded(f"synthetic {size}", row_of)(count, split=split, seed=seed), split)


# full size

SLOT = re.compile(r"\{(\w+)([:=?])([^}]*)\}")
VALUE_TEST_EVERY = 5  # every fifth value of a kind is for the test split
TYPES = {str: "string", int: "integer", float: "number"}
PEOPLE = [(first, last) for last in WORDS["last_names"] for first in WORDS["first_names"]]
# {kind: values of one type}
KINDS: dict[str, list[Value]] = {
    **WORDS["values"],
    "person": [f"{first} {last}" for first, last in PEOPLE],
    "email": [f"{a}.{b}@{domain}".lower() for domain in WORDS["domains"] for a, b in PEOPLE],
    "date": [f"2027-{month:02d}-{day:02d}" for month in range(1, 13) for day in range(1, 29)],
    "time": [f"{hour:02d}:{ten}5" for hour in range(24) for ten in range(6)],
    "code": [f"{'KQRTVX'[i % 6]}{'BDFGHM'[i // 6 % 6]}-{1000 + i}" for i in range(9000)],
    # integers are split by value, so that a value of one split never occurs in the other split
    "few": [*range(15)],
    "many": [*range(500)],
    # never whole numbers, so that no number equals an integer
    "amount": [round(10 + i // 5 + (i % 5 * 10 + 25) / 100, 2) for i in range(4990)],
}


def _full_parts(calls: int, split: Split, rng: Random) -> Parts:
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
    opening, close = rng.choice(WORDS["openings"])
    joined = ", then ".join(requests[:2]) + "".join(f", and finally {r}" for r in requests[2:])
    return system, f"{opening} {joined}{close}", thought, gold_calls, None


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


def _tiny_parts(calls: int, split: Split, rng: Random) -> Parts:
    word = partial(_combination, split, rng)
    names: dict[str, None] = {}  # each once, in order
    while len(names) < max(2, calls):
        names[word("verbs", "nouns", "_")] = None
    tools = [(name, _tiny_signature(split, rng)) for name in names]
    system = compact_system_prompt([{"name": n, "parameters": types} for n, types in tools])
    if not calls:
        reply = word("heads", "tails", "-")
        return system, f'no tool, just say "{reply}"', "no call", [], reply
    gold_calls, requests = [], []
    for name, types in rng.sample(tools, calls):
        values = {
            key: word("heads", "tails", "-")
            if schema["type"] == "string"
            else int(word("first_digits", "last_digits", ""))
            for key, schema in types.items()
        }
        gold_calls.append({"name": name, "parameters": values})
        said = ", ".join(f'"{key}" is {json.dumps(value)}' for key, value in values.items())
        requests.append(f"{name}: {said}")
    return system, "; ".join(requests), COUNT_WORDS[calls], gold_calls, None


def _tiny_signature(split: Split, rng: Random) -> dict[str, dict[str, str]]:
    text_key, integer_key = _combination(split, rng, "text_keys", "integer_keys", " ").split()
    pair = [(text_key, {"type": "string"}), (integer_key, {"type": "integer"})]
    return dict(pair if rng.random() < 0.5 else pair[::-1])


def _combination(split: Split, rng: Random, first: str, second: str, link: str) -> str:
    """Return two linked words; the places of both words decide which split may use the pair."""
    lefts, rights = WORDS["tiny"][first], WORDS["tiny"][second]
    while True:
        left, right = rng.randrange(len(lefts)), rng.randrange(len(rights))
        if ((left + right) % WORD_TEST_EVERY == WORD_TEST_EVERY - 1) == (split == "test"):
            return f"{lefts[left]}{link}{rights[right]}"


SOURCES = Sources(
    task=TASK,
    base_url=f"https://raw.githubusercontent.com/qiancheng0/ToolRL/{COMMIT}",
    files={
        "train": ("dataset/rlla_4k/train.parquet", "0ddc730c556e4d26449dbdb55a1b28be824a8bfe"),
        "test": ("dataset/rlla_4k/test.parquet", "ccdac1cc0112fb54dd68cbc88d9abfe28ce3d749"),
    },
    row_of=_row_of_item,
    make_rows=make_rows,
    synthetic_choices={"size": get_args(Size)},
    # in upstream's and in synthetic `extra_info`: prompt and ground truth once more
    dropped=(*JSON_KEYS, "kind", "calls"),
)
