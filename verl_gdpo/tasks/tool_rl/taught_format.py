"""Which format of calls a chat template teaches.

The template is given a call, and what it writes is read: so no table of models is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from verl_gdpo.tasks.tool_rl.call_formats import BEHIND_SPECIAL_TOKENS, CALL_FORMATS
from verl_gdpo.tasks.tool_rl.form import Call

QUESTION = {"role": "user", "content": "What is it?"}
# In XML, a value has no type, so this one is a text.
CALL: Call = {"name": "look_up", "parameters": {"word": "tree"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
# Most templates want the arguments as an object, and others, as OpenAI has them, as a text of JSON.
ARGUMENTS = (CALL["parameters"], '{"word": "tree"}')

# `render(messages, tools)` returns what a chat template writes, without the header of an answer.
Render = Callable[[Sequence[Any], Sequence[Any]], str]


def written_call(render: Render) -> str:
    """Return what a chat template writes for a message with a call; "" if that has no call."""
    before = render([QUESTION], [TOOL])
    for arguments in ARGUMENTS:
        function = {"name": CALL["name"], "arguments": arguments}
        # Templates of Mistral take an id of nine characters and no other.
        call = {"type": "function", "id": "call00001", "function": function}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            after = render([QUESTION, answer], [TOOL])
        except Exception:
            # A template may raise whatever it likes for arguments that it does not know.
            continue
        written = after[first_difference(before, after) :]
        if CALL["name"] in written:
            return written
    return ""


def first_difference(one: str, other: str) -> int:
    """Return the place of the first character that differs, or the end of the shorter text."""
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return place
    return min(len(one), len(other))


def format_of(written: str) -> str:
    r"""Return the format in which a text has `CALL`; "" if it is none that tool_rl knows.

    >>> format_of('<tool_call>\n{"name": "look_up", "arguments": {"word": "tree"}}\n</tool_call>')
    'hermes'

    Args:
        written: see `written_call`.
    """
    for name, mark in BEHIND_SPECIAL_TOKENS.items():
        if mark in written:
            return name
    # The format without tags is the last one, because its reader finds the JSON of others too.
    for name, call_format in CALL_FORMATS.items():
        if call_format.read(written, {}).calls == [CALL]:
            return name
    return ""
