"""The format of a ToolRL answer: its tags, its JSON keys, and the system prompt that asks for it.

The scorer (`tool_rl.py`), data preparation and the warm start of the CPU policy all import this
module, so that prompt, ground truths and parser cannot disagree.

A tool is a mapping such as

    {"name": "book_hotel", "description": "Reserve a hotel room.",
     "parameters": {"city": {"type": "string"}, "nights": {"type": "integer"}}}

The parameter types are string, integer, number, boolean and array. A string may list its allowed
values under "enum".
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<response>", "</response>"
NAME_KEY, PARAMETERS_KEY = "name", "parameters"

CALL_TAGS, RESPONSE_TAGS = (TOOL_CALL_OPEN, TOOL_CALL_CLOSE), (RESPONSE_OPEN, RESPONSE_CLOSE)
TAGS = (THINK_OPEN, THINK_CLOSE, *CALL_TAGS, *RESPONSE_TAGS)

Call = Mapping[str, Any]
Tool = Mapping[str, Any]


def render_answer(
    thought: str, calls: Sequence[Call] = (), response_text: str | None = None
) -> str:
    r"""Return an answer in the format: a think block, then a block of calls, a response, or both.

    >>> render_answer("x", [{"name": "f", "parameters": {"a": 1}}])
    '<think> x </think>\n<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n</tool_call>'
    >>> render_answer("x", response_text="Hi.")
    '<think> x </think>\n<response> Hi. </response>'

    Args:
        thought: text of the think block.
        calls: objects with a string "name" and an object "parameters". If it is empty, the answer
            has no block of calls.
        response_text: text of the response block. With None, the answer has no such block.

    Raises:
        ValueError: a call has another form, or a text contains one of the format's tags.
    """
    blocks = [f"{THINK_OPEN} {thought} {THINK_CLOSE}"]
    if calls:
        lines = "\n".join(_call_line(call) for call in calls)
        blocks.append(f"{TOOL_CALL_OPEN}\n{lines}\n{TOOL_CALL_CLOSE}")
    if response_text is not None:
        blocks.append(f"{RESPONSE_OPEN} {response_text} {RESPONSE_CLOSE}")
    answer = "\n".join(blocks)
    if sum(answer.count(tag) for tag in TAGS) != 2 * len(blocks):
        raise ValueError(
            f"render_answer: a text contains one of the tags {', '.join(TAGS)}; expected them "
            f"around the blocks only: {answer[:300]!r}"
        )
    return answer


def _call_line(call: Call) -> str:
    name, parameters = call.get(NAME_KEY), call.get(PARAMETERS_KEY)
    if set(call) != {NAME_KEY, PARAMETERS_KEY} or not (
        isinstance(name, str) and isinstance(parameters, Mapping)
    ):
        raise ValueError(
            f"render_answer, call: got {call!r}; expected exactly a string "
            f'"{NAME_KEY}" and an object "{PARAMETERS_KEY}"'
        )
    return _json({NAME_KEY: name, PARAMETERS_KEY: dict(parameters)})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def system_prompt(tools: Sequence[Tool]) -> str:
    """Return the system prompt for an instruct model: the tools and how to answer.

    Args:
        tools: at least one tool; see the module's docstring.

    Raises:
        ValueError: there is no tool.
    """
    signatures = "\n".join(_json(dict(tool)) for tool in _at_least_one(tools))
    call = _json({NAME_KEY: "tool_a", PARAMETERS_KEY: {"key": "text", "other_key": 7}})
    other_call = _json({NAME_KEY: "tool_b", PARAMETERS_KEY: {}})
    return f"""\
You handle requests for an application. It can run the tools listed below; you decide which of \
them to run, and with what.

# Tools
One signature per line, in JSON: the tool's name, its purpose, and the type of every parameter.
{signatures}

# How you answer
1. Reason: between {THINK_OPEN} and {THINK_CLOSE}, note what is asked and which tools provide it.
2. Call: when tools are needed, put the calls between {TOOL_CALL_OPEN} and {TOOL_CALL_CLOSE}, one \
JSON object per line, in the order of the request. Give every parameter of the signature, with \
its type: texts in quotes, numbers and true/false without. Copy values exactly as requested.
3. Reply: when no tool is needed, skip step 2 and put your reply between {RESPONSE_OPEN} and \
{RESPONSE_CLOSE}.

An answer that calls tools has exactly these lines:
{THINK_OPEN} your reasoning {THINK_CLOSE}
{TOOL_CALL_OPEN}
{call}
{other_call}
{TOOL_CALL_CLOSE}

An answer without tools has exactly these:
{THINK_OPEN} your reasoning {THINK_CLOSE}
{RESPONSE_OPEN} your reply {RESPONSE_CLOSE}

Write every tag once, and nothing before the first or after the last."""


def compact_system_prompt(tools: Sequence[Tool]) -> str:
    r"""Return the tools alone, one short line each, for a model that was trained on the format.

    >>> compact_system_prompt([{"name": "f", "parameters": {"a": {"type": "integer"}}}])
    'Tools:\nf {"a": "integer"}'

    Raises:
        ValueError: no tool.
    """
    lines = [
        f"{tool[NAME_KEY]} {_json({key: p['type'] for key, p in tool[PARAMETERS_KEY].items()})}"
        for tool in _at_least_one(tools)
    ]
    return "\n".join(["Tools:", *lines])


def _at_least_one(tools: Sequence[Tool]) -> Sequence[Tool]:
    if not tools:
        raise ValueError("system prompt: got no tools; expected at least one")
    return tools


def labels(ground_truth: str) -> list[str]:
    """Return what a well-formed ground truth asks for; the report of the data counts it.

    >>> labels(render_answer("x", response_text="Hi."))
    ['asks for: response', 'calls: 0']
    """
    tags = {"calls": TOOL_CALL_OPEN, "response": RESPONSE_OPEN}
    asked = " and ".join(name for name, tag in tags.items() if tag in ground_truth)
    calls = len(first_block_lines(ground_truth)) if TOOL_CALL_OPEN in ground_truth else 0
    return [f"asks for: {asked or 'neither'}", f"calls: {calls}"]


def first_block_lines(text: str) -> list[str]:
    """Return the lines of the first tool-call block, up to a closing or a second opening tag."""
    block = text.split(TOOL_CALL_OPEN, 2)[1].split(TOOL_CALL_CLOSE, 1)[0]
    # splitlines() would also cut at characters such as U+2028, which JSON allows in a string.
    return block.strip().split("\n")
