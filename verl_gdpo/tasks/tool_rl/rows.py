"""Tool calling (ToolRL's rlla_4k): from upstream, from local files, or synthetic.

Upstream is github.com/qiancheng0/ToolRL (Apache-2.0) at a fixed commit.

Synthetic rows are for the CPU policy of `workshop.tiny_policy`: names, keys and values combine a
hundred short words, and prompts have at most 76 tokens, and answers 49, of that policy's
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
import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from verl_gdpo.tasks.preparation.schema import Row, require
from verl_gdpo.tasks.preparation.sources import Sources, make_row, seeded, strings_of
from verl_gdpo.tasks.tool_rl import system_message
from verl_gdpo.tasks.tool_rl.call_formats import TOOLRL, call_format_of
from verl_gdpo.tasks.tool_rl.form import (
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    compact_system_prompt,
    render_answer,
)
from verl_gdpo.tasks.tool_rl.score import TASK

COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
JSON_KEYS = ("instruction", "input", "output")
CALLS_BLOCK = re.compile(rf"{TOOL_CALL_OPEN}\n.*?\n{TOOL_CALL_CLOSE}", re.DOTALL)  # ToolRL's

RESPONSE_SHARE = 0.1  # share of rows that ask for a response without a call
CALL_WEIGHTS = {1: 0.5, 2: 0.3, 3: 0.2}  # {number of calls: share of the other rows}
COUNT_WORDS = {1: "one call", 2: "two calls", 3: "three calls"}
WORDS = json.loads(Path(__file__).with_name("words.json").read_bytes())
TEST_EVERY = 4  # of the combinations of two words or two digits


def _row_of_item(item: Any, *_: Any) -> Row:
    fields = strings_of(item, JSON_KEYS)
    # upstream's parquet files have the ability "math", and our rows must be the same
    return make_row(TASK, fields["input"], fields["output"], fields["instruction"], ability="math")


def _made_row(rng: Random, split: str) -> Row:
    """A row as ToolRL's: as a response, its ground truth scores format 1 and correctness 3.

    About a tenth of the rows ask for a response without a call; their correctness is 0.
    """
    call_count = _made_call_count(rng)
    tools = _made_tools(rng, split, call_count)
    system = compact_system_prompt(tools)
    if call_count == 0:
        reply = _combination(split, rng, "heads", "tails", "-")
        request = f'no tool, just say "{reply}"'
        answer = render_answer("no call", response_text=reply)
        return make_row(TASK, request, answer, system, "tool_calling")

    calls = []
    requests = []
    for name, types in rng.sample(list(tools.items()), call_count):
        values = _made_values(rng, split, types)
        calls.append({"name": name, "parameters": values})
        pairs = ", ".join(f'"{key}" is {json.dumps(value)}' for key, value in values.items())
        requests.append(f"{name}: {pairs}")
    answer = render_answer(COUNT_WORDS[call_count], calls)
    return make_row(TASK, "; ".join(requests), answer, system, "tool_calling")


def _made_call_count(rng: Random) -> int:
    if rng.random() < RESPONSE_SHARE:
        return 0
    counts = list(CALL_WEIGHTS)
    weights = list(CALL_WEIGHTS.values())
    return rng.choices(counts, weights)[0]


def _made_tools(rng: Random, split: str, call_count: int) -> dict[str, dict[str, str]]:
    """Return {tool: {parameter: type}}, at least two of them."""
    names: list[str] = []
    while len(names) < max(2, call_count):
        name = _combination(split, rng, "verbs", "nouns", "_")
        if name not in names:
            names.append(name)
    return {name: _signature(split, rng) for name in names}


def _signature(split: str, rng: Random) -> dict[str, str]:
    keys = _combination(split, rng, "text_keys", "integer_keys", " ")
    text_key, integer_key = keys.split()
    if rng.random() < 0.5:
        return {text_key: "string", integer_key: "integer"}
    return {integer_key: "integer", text_key: "string"}


def _made_values(rng: Random, split: str, types: Mapping[str, str]) -> dict[str, Any]:
    """Return {parameter: value}."""
    values: dict[str, Any] = {}
    for key, kind in types.items():
        if kind == "string":
            values[key] = _combination(split, rng, "heads", "tails", "-")
        else:
            values[key] = int(_combination(split, rng, "first_digits", "last_digits", ""))
    return values


def _combination(split: str, rng: Random, first: str, second: str, link: str) -> str:
    """Return two linked words; the places of both words decide which split may use the pair.

    Args:
        first: the key in `words.json` of the word on the left.
        second: that of the word on the right.
        link: what stands between both.
    """
    lefts = WORDS[first]
    rights = WORDS[second]
    while True:
        left = rng.randrange(len(lefts))
        right = rng.randrange(len(rights))
        is_of_test = (left + right) % TEST_EVERY == TEST_EVERY - 1
        if is_of_test == (split == "test"):
            return f"{lefts[left]}{link}{rights[right]}"


def in_call_format(row: Row, call_format: str) -> Row:
    """Return a row whose system message teaches a format of calls; the ground truth stays.

    The calls of earlier turns, which other messages show, are written in the format too.

    Raises:
        ValueError: the row has no system message that lists tools. It may be any JSON object.
    """
    prompt = row.get("prompt")
    system = None
    if isinstance(prompt, list) and prompt:
        system = prompt[0]
    role = None
    content = None
    if isinstance(system, dict):
        role = system.get("role")
        content = system.get("content")
    is_message = role == "system" and isinstance(content, str)
    require(is_message, "prompt[0]", system, "a system message with tools")
    try:
        content = system_message.in_call_format(str(content), call_format)
    except ValueError as error:
        raise ValueError(f"field prompt[0].content: {error}") from error
    messages = [_with_calls_in_format(message, call_format) for message in row["prompt"]]
    messages[0] = {"role": "system", "content": content}
    changed = dict(row)
    changed["prompt"] = messages
    return changed


def _with_calls_in_format(message: Any, call_format: str) -> Any:
    """Return a message whose blocks of ToolRL's calls are written in another format.

    A block that cannot be read stays as it is, and so does anything that is no message.
    """
    has_text = isinstance(message, dict) and isinstance(message.get("content"), str)
    if not has_text or call_format == TOOLRL:
        return message

    def in_format(block: re.Match[str]) -> str:
        read = call_format_of(TOOLRL).read(block[0], {})
        if read.unread or not read.calls:
            return block[0]
        return call_format_of(call_format).write(read.calls)

    return {**message, "content": CALLS_BLOCK.sub(in_format, message["content"])}


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
