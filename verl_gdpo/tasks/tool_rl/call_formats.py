"""How a model writes its calls of tools: a reader and a writer for each format.

The names are verl's `actor_rollout_ref.rollout.multi_turn.format`, and `toolrl` is ToolRL's own:

    toolrl        one block <tool_call>, a line for each {"name": ..., "parameters": {...}}
    hermes        a block <tool_call> for each {"name": ..., "arguments": {...}}: Qwen2.5, Qwen3
    qwen3_coder   a block <tool_call> for each <function=NAME>, in XML: Qwen3-Coder, Qwen3.5
    llama3_json   {"name": ..., "parameters": {...}} without any tag: Llama 3.1 to 3.3

A reader finds the calls that the agent loop of verl finds in the same text, with these differences:

- It also says what it could not read. verl logs that and goes on.
- A parameter in XML is text. verl gives it the type that the schema of the tool names. A scorer has
  no schema, so that here the ground truth gives the type: a number where a number is right. Lists
  and objects are read as JSON, as chat templates write them, and never as Python.
- verl 0.9.1 has no parser for `llama3_json`, although it names one. vLLM's is followed, outside of
  the thought: all braces there are calls.

Time is linear in the length of the text, whatever the text is. No text raises.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_gdpo.tasks.tool_rl.form import (
    CALL_TAGS,
    NAME_KEY,
    PARAMETERS_KEY,
    RESPONSE_OPEN,
    THINK_CLOSE,
    THINK_OPEN,
    TOOL_CALL_CLOSE,
    TOOL_CALL_OPEN,
    Call,
    first_block_lines,
)

ARGUMENTS_KEY = "arguments"
FUNCTION_OPEN, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER_OPEN, PARAMETER_CLOSE = "<parameter=", "</parameter>"
PYTHON_TAG = "<|python_tag|>"  # Llama may write it before its calls
BETWEEN_OBJECTS = "; "  # how Llama's calls are separated, where it writes several

# Why a call was not read. These are names of metrics.
NO_CALL = "no_call"
NOT_CLOSED = "call_not_closed"
MALFORMED = "call_malformed"
INCOMPLETE = "call_incomplete"
REASONS = (NO_CALL, NOT_CLOSED, MALFORMED, INCOMPLETE)

_decode = json.JSONDecoder().decode  # faster than json.loads, which checks its options at each call
_decode_from = json.JSONDecoder().raw_decode

# {name of a function: {parameter: its right values, of all right calls of the function}}
RightValues = Mapping[str, Mapping[str, Sequence[Any]]]


@dataclass
class CallsRead:
    """What a reader found in a text.

    calls: in their order, each with "name" and "parameters", whatever JSON these are.
    unread: why something that stands for a call was not read, one of `REASONS` each.
    """

    calls: list[Call] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def add(self, call: Any, parameters_key: str) -> None:
        """Add a call that was written as JSON; its parameters may be anything but missing."""
        is_named = isinstance(call, dict) and isinstance(call.get(NAME_KEY), str)
        if is_named and parameters_key in call:
            self.calls.append({NAME_KEY: call[NAME_KEY], PARAMETERS_KEY: call[parameters_key]})
        else:
            self.unread.append(INCOMPLETE)


@dataclass(frozen=True)
class CallFormat:
    """One format.

    read: `read(text, right_values)` returns the calls of a response.
    write: returns the text of some calls, at least one, as the model's chat template writes them.
    is_block: whether a text holds calls and nothing else but white space around and between them.
        None: the layout is ToolRL's own pattern.
    tags: stand around a call, and nowhere else in a well-formed response.
    """

    read: Callable[[str, RightValues], CallsRead]
    write: Callable[[Sequence[Call]], str]
    is_block: Callable[[str], bool] | None = None
    tags: tuple[str, ...] = ()


# --- toolrl ---------------------------------------------------------------------------------------


def _read_toolrl(text: str, _: RightValues) -> CallsRead:
    """The first block; after a line that cannot be read, the others are not tried."""
    read = CallsRead()
    if TOOL_CALL_OPEN not in text:
        read.unread.append(NO_CALL)
        return read
    if TOOL_CALL_CLOSE not in text:
        read.unread.append(NOT_CLOSED)
        return read
    for line in first_block_lines(text):
        try:
            call = _decode(line)
        except (ValueError, RecursionError):  # A ValueError may be an int with too many digits.
            read.unread.append(MALFORMED)
            return read
        # Each line is checked at once, so that a long worthless block ends at its first line.
        if not _has_scalar_name(call):
            read.unread.append(INCOMPLETE)
            return read
        read.calls.append(call)
    return read


def _has_scalar_name(call: Any) -> bool:
    if not isinstance(call, dict) or NAME_KEY not in call:
        return False
    return not isinstance(call[NAME_KEY], dict | list)


def _write_toolrl(calls: Sequence[Call]) -> str:
    lines = "\n".join(map(_as_json, calls))
    return f"{TOOL_CALL_OPEN}\n{lines}\n{TOOL_CALL_CLOSE}"


# --- hermes ---------------------------------------------------------------------------------------


def _read_hermes(text: str, _: RightValues) -> CallsRead:
    read = CallsRead()
    for block, is_closed in _between(text, TOOL_CALL_OPEN, TOOL_CALL_CLOSE):
        if not is_closed:
            read.unread.append(NOT_CLOSED)
            break
        try:
            call = _decode(block)
        except (ValueError, RecursionError):
            read.unread.append(MALFORMED)
            continue
        read.add(call, ARGUMENTS_KEY)
    return _or_no_call(read)


def _write_hermes(calls: Sequence[Call]) -> str:
    blocks = []
    for call in calls:
        written = _as_json({NAME_KEY: call[NAME_KEY], ARGUMENTS_KEY: call[PARAMETERS_KEY]})
        blocks.append(f"{TOOL_CALL_OPEN}\n{written}\n{TOOL_CALL_CLOSE}")
    return "\n".join(blocks)


def _are_tagged_blocks(text: str) -> bool:
    """Whether there are blocks <tool_call>, whose tags stand on lines of their own."""
    before, opening, rest = text.partition(TOOL_CALL_OPEN)
    if before.strip() or not opening:
        return False
    for block in rest.split(TOOL_CALL_OPEN):
        body, closing, after = block.partition(TOOL_CALL_CLOSE)
        if not closing or after.strip():
            return False
        # Between both tags there are two line ends, each of them for one tag.
        if len(body) < 2 or not (body.startswith("\n") and body.endswith("\n")):
            return False
    return True


# --- qwen3_coder ----------------------------------------------------------------------------------


def _read_qwen3_coder(text: str, right_values: RightValues) -> CallsRead:
    read = CallsRead()
    for block, is_closed in _between(text, TOOL_CALL_OPEN, TOOL_CALL_CLOSE):
        if not is_closed:
            block = block.removesuffix("\n")
        functions = list(_between(block, FUNCTION_OPEN, FUNCTION_CLOSE))
        if not functions:
            if is_closed:
                read.unread.append(INCOMPLETE)
            else:
                read.unread.append(NOT_CLOSED)
        # A function that is not closed is read too, as verl does.
        for function, _ in functions:
            name, end_of_name, body = function.partition(">")
            if not end_of_name:
                read.unread.append(MALFORMED)
                continue
            parameters = _read_parameters(body, right_values.get(name, {}))
            read.calls.append({NAME_KEY: name, PARAMETERS_KEY: parameters})
    return _or_no_call(read)


def _read_parameters(text: str, right: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    parameters = {}
    for parameter, is_closed in _between(text, PARAMETER_OPEN, PARAMETER_CLOSE):
        if not is_closed:
            parameter = parameter.removesuffix("\n")
        key, end_of_key, value = parameter.partition(">")
        if end_of_key:
            value = value.removeprefix("\n").removesuffix("\n")
            parameters[key] = _typed(value, right.get(key, ()))
    return parameters


def _typed(text: str, right_values: Sequence[Any]) -> Any:
    """Return the value that a text stands for: a right one if it stands for one of these."""
    readings = [_typed_as(text, right) for right in right_values]
    for reading, right in zip(readings, right_values, strict=True):
        if reading == right:
            return reading
    if not readings:
        return _typed_as(text, None)
    return readings[0]


def _typed_as(text: str, right: Any) -> Any:
    """Return the value that a text stands for, where the right value is of the type of `right`.

    A text that is none of this type stays a text, as in verl.
    """
    if text.lower() == "null":
        return None
    if isinstance(right, bool):
        return text.lower() == "true"
    try:
        if isinstance(right, int):
            return int(text)
        if isinstance(right, float):
            number = float(text)
            if number == int(number):
                return int(number)
            return number
        if isinstance(right, dict | list):
            return _decode(text)
    except (ValueError, OverflowError, RecursionError):
        pass
    return text


def _write_qwen3_coder(calls: Sequence[Call]) -> str:
    blocks = []
    for call in calls:
        lines = [TOOL_CALL_OPEN, f"{FUNCTION_OPEN}{call[NAME_KEY]}>"]
        for key, value in call[PARAMETERS_KEY].items():
            written = value
            if not isinstance(value, str):
                written = _as_json(value)
            lines += [f"{PARAMETER_OPEN}{key}>", written, PARAMETER_CLOSE]
        lines += [FUNCTION_CLOSE, TOOL_CALL_CLOSE]
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


# --- llama3_json ----------------------------------------------------------------------------------


def _read_llama3_json(text: str, _: RightValues) -> CallsRead:
    read = CallsRead()
    for call in _objects(_after_thought(text)):
        if call is None:
            read.unread.append(MALFORMED)
        elif isinstance(call, dict) and ARGUMENTS_KEY in call:
            read.add(call, ARGUMENTS_KEY)
        else:
            read.add(call, PARAMETERS_KEY)
    return _or_no_call(read)


def _after_thought(text: str) -> str:
    """What stands after the first closing tag of a thought; nothing, if it is never closed."""
    _, closing, answer = text.partition(THINK_CLOSE)
    if closing:
        return answer
    if text.lstrip().startswith(THINK_OPEN):
        return ""
    return text


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects before a <response>; None for a broken one, which is the last."""
    start = text.find("{")
    response = text.find(RESPONSE_OPEN)
    while start >= 0:
        if 0 <= response < start:
            return
        try:
            value, end = _decode_from(text, start)
        except (ValueError, RecursionError):
            # Another try would start inside of this object, and read the same text again.
            yield None
            return
        yield value
        start = text.find("{", end)
        if 0 <= response < end:
            # That tag is in a string of the object.
            response = text.find(RESPONSE_OPEN, end)


def _write_llama3_json(calls: Sequence[Call]) -> str:
    objects = []
    for call in calls:
        # A call may have other keys, which are not written.
        written = {NAME_KEY: call[NAME_KEY], PARAMETERS_KEY: call[PARAMETERS_KEY]}
        objects.append(_as_json(written))
    return BETWEEN_OBJECTS.join(objects)


def _are_objects(text: str) -> bool:
    """Whether there are JSON objects alone; `;` may separate them."""
    rest = text.strip().removeprefix(PYTHON_TAG)
    position = 0
    is_any = False
    while position < len(rest):
        if rest[position].isspace() or (is_any and rest[position] == ";"):
            position += 1
            continue
        if rest[position] != "{":
            return False
        try:
            _, position = _decode_from(rest, position)
        except (ValueError, RecursionError):
            return False
        is_any = True
    return is_any


# --- of several formats ---------------------------------------------------------------------------


def _between(text: str, opening: str, closing: str) -> Iterator[tuple[str, bool]]:
    """Yield what stands between two tags, and whether it ends with the closing one.

    What follows a last opening tag without a closing one is yielded up to the end of the text.
    """
    position = text.find(opening)
    while position >= 0:
        start = position + len(opening)
        end = text.find(closing, start)
        if end < 0:
            yield text[start:], False
            return
        yield text[start:end], True
        position = text.find(opening, end + len(closing))


def _as_json(value: Any) -> str:
    """As templates write it. Calls that were read from JSON may hold NaN."""
    return json.dumps(value, ensure_ascii=False)


def _or_no_call(read: CallsRead) -> CallsRead:
    if not read.calls and not read.unread:
        read.unread.append(NO_CALL)
    return read


TOOLRL = "toolrl"
CALL_FORMATS = {
    TOOLRL: CallFormat(_read_toolrl, _write_toolrl),
    "hermes": CallFormat(_read_hermes, _write_hermes, _are_tagged_blocks, CALL_TAGS),
    "qwen3_coder": CallFormat(_read_qwen3_coder, _write_qwen3_coder, _are_tagged_blocks, CALL_TAGS),
    "llama3_json": CallFormat(_read_llama3_json, _write_llama3_json, _are_objects),
}

# Of these, TRL takes the calls apart; it hands on those of the others as the model's own JSON.
XML_AND_BARE = ("qwen3_coder", "llama3_json")

# Formats that verl reads and that no scorer can: their marks are special tokens, which are no part
# of a decoded response. {name: a mark that stands in each call}
BEHIND_SPECIAL_TOKENS = {
    "gpt-oss": "<|channel|>commentary",
    "kimi": "<|tool_call_begin|>",
    "gemma4": "<|tool_call>",
}


def call_format_of(name: str) -> CallFormat:
    """Return a format.

    Raises:
        ValueError: there is none of this name.
    """
    if isinstance(name, str) and name in CALL_FORMATS:
        return CALL_FORMATS[name]
    why = ""
    if isinstance(name, str) and name in BEHIND_SPECIAL_TOKENS:
        why = (
            f". Models of the format {name} write calls between special tokens, which a response "
            "loses before it is scored, so tool_rl cannot train them"
        )
    raise ValueError(
        f"tool_rl call_format: got {name!r}; expected one of {', '.join(CALL_FORMATS)}{why}"
    )
