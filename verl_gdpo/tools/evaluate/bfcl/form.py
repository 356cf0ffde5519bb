"""ToolRL's form of BFCL: what a policy is asked, and which calls its answer makes.

The sentences of the prompt stand in prompts.yaml. The public handler that they come from needs
changes of its BFCL package which nobody published.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from verl_gdpo.scoring.response import Response, arguments_for
from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tasks.tool_rl.form import (
    NAME_KEY,
    PARAMETERS_KEY,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    render_answer,
)
from verl_gdpo.tools.evaluate.benchmark import Messages

Tool = Mapping[str, Any]  # {"name": ..., "description": ..., "parameters": {"properties": ...}}

# So many steps of a turn may have calls. One more with calls ends the dialogue as wrong.
MAX_STEPS = 20

_PROMPTS = yaml.safe_load(Path(__file__).with_name("prompts.yaml").read_text(encoding="utf-8"))


def prompt(tools: Sequence[Tool], dialogue: Messages, *, multi_turn: bool) -> Messages:
    """Return the system message with the tools, and one user message with the whole dialogue.

    Args:
        tools: the package's documents of functions, each with its hint about the language.
        dialogue: messages so far. The roles are user, assistant (an answer as the policy wrote it)
            and tool (a result, whose "name" is the call as text). System messages are left out.
        multi_turn: which of two fixed sentences follows each request.
    """
    listed = "\n".join(_numbered(tool, number) for number, tool in enumerate(tools, 1))
    request = _PROMPTS["single_turn"]
    if multi_turn:
        request = _PROMPTS["multi_turn"]
    lines = "".join(_line(message, request) for message in dialogue)
    if dialogue and dialogue[-1]["role"] == "tool":
        lines += f"\n<user> {_PROMPTS['after_results']} </user>\n"
    return [
        {"role": "system", "content": _PROMPTS["system"].format(tools=listed)},
        {"role": "user", "content": f"**Dialogue Records History**\n{lines}".strip()},
    ]


def _numbered(tool: Tool, number: int) -> str:
    """Return a tool as the system message lists it."""
    parameters = json.dumps(tool["parameters"].get("properties", {}))
    return (
        f"{number}. Name: {tool['name']}\nDescription: {tool['description']}\n"
        f"Parameters: {parameters}"
    )


def _line(message: Mapping[str, str], request: str) -> str:
    """Return a message as the dialogue so far has it."""
    text = message["content"].strip()
    if message["role"] == "user":
        return f"<user> {text}\n{request} </user>\n"
    if message["role"] == "tool":
        name = message["name"].strip()
        return f"<obs> You have made the tool call {name}. Execution returns: {text} </obs>\n"
    if message["role"] == "assistant":
        return f"\n{text}\n"
    return ""


@dataclass(frozen=True)
class Call:
    """A call that an answer makes; its parameters are JSON values."""

    name: str
    parameters: dict[str, Any]

    def __str__(self) -> str:
        """As Python would write it: what the policy reads about it later.

        >>> str(Call("f", {"a": "b"}))
        "f(a='b')"
        """
        parameters = ", ".join(f"{key}={value!r}" for key, value in self.parameters.items())
        text = f"{self.name}({parameters})"
        # JSON may hold half a character.
        return text.encode(errors="backslashreplace").decode()


def calls(answer: str, *, multi_turn: bool) -> list[Call]:
    """Return the calls of the last block, one JSON object a line; `<think>` is not needed.

    Lines that cannot be read, and calls of the name "none", are left out. A call whose parameters
    are not an object undoes all of them, because the package then finds no call in the answer.

    Args:
        multi_turn: a call may then lack its parameters.
    """
    if TOOL_CALL_OPEN not in answer:
        return []
    block = answer.rpartition(TOOL_CALL_OPEN)[2].partition(TOOL_CALL_CLOSE)[0]
    made = []
    for line in block.strip().split("\n"):
        try:
            read = json.loads(line)
        except (ValueError, RecursionError):
            # It is not JSON, or nested too deep for Python.
            continue
        if not isinstance(read, dict) or not isinstance(read.get(NAME_KEY), str):
            continue
        if read[NAME_KEY].strip().lower() == "none":
            continue
        if PARAMETERS_KEY not in read and not multi_turn:
            continue
        parameters = read.get(PARAMETERS_KEY, {})
        if not isinstance(parameters, dict):
            return []
        made.append(Call(read[NAME_KEY], parameters))
    return made


# A ground truth of each form: calls, a reply, and both.
_KINDS = [
    render_answer("", [{NAME_KEY: "f", PARAMETERS_KEY: {}}]),
    render_answer("", response_text=""),
    render_answer("", [{NAME_KEY: "f", PARAMETERS_KEY: {}}], ""),
]


def is_correct_format(response: Response) -> bool:
    """Return whether an answer has one of ToolRL's three forms: calls, a reply, or both."""
    text, told = arguments_for(tool_rl.TASK, response)
    return any(tool_rl.score(text, kind, **told)["format"] == 1 for kind in _KINDS)
