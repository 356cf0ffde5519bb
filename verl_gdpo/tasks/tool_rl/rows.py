"""Tool calling (ToolRL's rlla_4k): from upstream, from local files, or synthetic.

Upstream is github.com/qiancheng0/ToolRL (Apache-2.0) at a fixed commit.

Synthetic rows are for the CPU policy of `workshop.tiny_policy`: names, keys and values combine a
hundred short words, and prompts and answers have at most about 70 tokens of that policy's
tokenizer. The train split never shows the tools (names and sets of parameter names) and values of
the test split. A row, with the prompt and the right answer:

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

`words.json` has the words.
"""

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from verl_gdpo.tasks.preparation.schema import Row, require
from verl_gdpo.tasks.preparation.sources import Sources, make_row, seeded, strings_of
from verl_gdpo.tasks.tool_rl import system_message
from verl_gdpo.tasks.tool_rl.form import compact_system_prompt, render_answer
from verl_gdpo.tasks.tool_rl.score import TASK

COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
JSON_KEYS = ("instruction", "input", "output")

RESPONSE_SHARE = 0.1  # share of rows that ask for a response without a call
CALL_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}  # {number of calls: share of the other rows}
COUNT_WORDS = {1: "one call", 2: "two calls", 3: "three calls"}
WORDS = json.loads(Path(__file__).with_name("words.json").read_text())
TEST_EVERY = 4  # of the combinations of two words or two digits


def _row_of_item(item: Any, *_: Any) -> Row:
    fields = strings_of(item, JSON_KEYS)
    # upstream's parquet files have the ability "math", and our rows must be the same
    return make_row(TASK, fields["input"], fields["output"], fields["instruction"], ability="math")


def _made_row(rng: Random, split: str) -> Row:
    """A row as ToolRL's: as a response, its ground truth scores format 1 and correctness 3.

    About a tenth of the rows ask for a response without a call; their correctness is 0.
    """
    calls = 0
    if rng.random() >= RESPONSE_SHARE:
        calls = rng.choices([*CALL_WEIGHTS], [*CALL_WEIGHTS.values()])[0]
    word = partial(_combination, split, rng)
    names: dict[str, None] = {}  # each once, in order
    while len(names) < max(2, calls):
        names[word("verbs", "nouns", "_")] = None
    tools = {name: _signature(split, rng) for name in names}
    system = compact_system_prompt(tools)
    if not calls:
        reply = word("heads", "tails", "-")
        answer = render_answer("no call", response_text=reply)
        return make_row(TASK, f'no tool, just say "{reply}"', answer, system, "tool_calling")
    gold_calls, requests = [], []
    for name, types in rng.sample([*tools.items()], calls):
        values = {
            key: word("heads", "tails", "-")
            if kind == "string"
            else int(word("first_digits", "last_digits", ""))
            for key, kind in types.items()
        }
        gold_calls.append({"name": name, "parameters": values})
        pairs = ", ".join(f'"{key}" is {json.dumps(value)}' for key, value in values.items())
        requests.append(f"{name}: {pairs}")
    answer = render_answer(COUNT_WORDS[calls], gold_calls)
    return make_row(TASK, "; ".join(requests), answer, system, "tool_calling")


def _signature(split: str, rng: Random) -> dict[str, str]:
    text_key, integer_key = _combination(split, rng, "text_keys", "integer_keys", " ").split()
    pair = [(text_key, "string"), (integer_key, "integer")]
    return dict(pair if rng.random() < 0.5 else pair[::-1])


def _combination(split: str, rng: Random, first: str, second: str, link: str) -> str:
    """Return two linked words; the places of both words decide which split may use the pair."""
    lefts, rights = WORDS[first], WORDS[second]
    while True:
        left, right = rng.randrange(len(lefts)), rng.randrange(len(rights))
        if ((left + right) % TEST_EVERY == TEST_EVERY - 1) == (split == "test"):
            return f"{lefts[left]}{link}{rights[right]}"


def in_call_format(row: Row, call_format: str) -> Row:
    """Return a row whose system message teaches a format of calls; the ground truth stays.

    Raises:
        ValueError: the row has no system message that lists tools. It may be any JSON object.
    """
    prompt = row.get("prompt")
    system = prompt[0] if isinstance(prompt, list) and prompt else None
    is_system = isinstance(system, dict) and system.get("role") == "system"
    content = system.get("content") if isinstance(system, dict) else None
    require(
        is_system and isinstance(content, str), "prompt[0]", system, "a system message with tools"
    )
    try:
        content = system_message.in_call_format(str(content), call_format)
    except ValueError as error:
        raise ValueError(f"field prompt[0].content: {error}") from error
    return {**row, "prompt": [{"role": "system", "content": content}, *row["prompt"][1:]]}


make_rows = seeded("synthetic tiny", _made_row)
SOURCES = Sources(
    task=TASK,
    base_url=f"https://raw.githubusercontent.com/qiancheng0/ToolRL/{COMMIT}",
    files={
        "train": ("dataset/rlla_4k/train.parquet", "0ddc730c556e4d26449dbdb55a1b28be824a8bfe"),
        "test": ("dataset/rlla_4k/test.parquet", "ccdac1cc0112fb54dd68cbc88d9abfe28ce3d749"),
    },
    row_of=_row_of_item,
    make_rows=make_rows,
    call_formats=system_message.OVERRIDES,
    in_call_format=in_call_format,
    dropped=JSON_KEYS,  # in upstream's `extra_info`: prompt and ground truth once more
)
