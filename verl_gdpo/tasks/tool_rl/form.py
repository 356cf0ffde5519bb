"""The format of a ToolRL answer: its tags, its JSON keys, and the system prompt that asks for it.

The scorer, data preparation and the warm start of the CPU policy all import this
module, so that prompt, ground truths and parser cannot disagree.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
TOOL_CALL_OPEN, TOOL_CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<response>", "</response>"
NAME_KEY, PARAMETERS_KEY = "name", "parameters"

CALL_TAGS, RESPONSE_TAGS = (TOOL_CALL_OPEN, TOOL_CALL_CLOSE), (RESPONSE_OPEN, RESPONSE_CLOSE)


def render_answer(
    thought: str, calls: Sequence[Mapping[str, Any]] = (), response_text: str | None = None
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
    """
    blocks = [f"{THINK_OPEN} {thought} {THINK_CLOSE}"]
    if calls:
        lines = "\n".join(map(_json, calls))
        blocks.append(f"{TOOL_CALL_OPEN}\n{lines}\n{TOOL_CALL_CLOSE}")
    if response_text is not None:
        blocks.append(f"{RESPONSE_OPEN} {response_text} {RESPONSE_CLOSE}")
    return "\n".join(blocks)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def compact_system_prompt(tools: Mapping[str, Mapping[str, str]]) -> str:
    r"""Return {tool: {parameter: type}}, one short line each, for a model trained on the format.

    >>> compact_system_prompt({"f": {"a": "integer"}})
    'Tools:\nf {"a": "integer"}'
    """
    return "\n".join(["Tools:", *(f"{name} {_json(types)}" for name, types in tools.items())])


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
