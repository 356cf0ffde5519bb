"""The system message of a row, for a model that writes calls in its own format.

verl gives the chat template one list of tools for all rows (`data.tool_config_path`), and each row
of ToolRL has its own tools. So the row's system message says what the template says of its argument
`tools`: rendered without that argument, the prompt has the same tokens. `TOOLS_AS` says for which
models, and the tests render the templates that TRL ships.

The tools are read from ToolRL's system message, or from a synthetic row's.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_gdpo.tasks.tool_rl.call_formats import TOOLRL
from verl_gdpo.tasks.tool_rl.form import COMPACT_HEADING, as_json

Tool = dict[str, Any]

# ToolRL's message: before the tools, the line above them, the next section, and the one after it
TOOLS_HEADING = "**Available Tools**\n"
TOOLS_LINE = "In your response, you can use the following tools:\n"
STEPS_HEADING = "**Steps for Each Turn**\n"
OUTPUT_HEADING = "**Output Format**\n"
FIELDS = ("{}. Name: ", "Description: ", "Parameters: ")  # of a tool, a line each

# what takes the place of ToolRL's own section and of the notes below it
OUTPUT = (
    OUTPUT_HEADING
    + "Begin with `<think>`, your thoughts, and `</think>`. Below them write function calls, or a "
    "response to the user between `<response>` and `</response>`, or the calls and then a response."
)

# {name in Python: name in JSON Schema}
SCHEMA_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "dict": "object",
    "object": "object",
    "list": "array",
    "array": "array",
    "tuple": "array",
    "set": "array",
}
OPTIONAL = ", optional"  # at the end of a type


def in_call_format(message: str, call_format: str) -> str:
    """Return the system message that teaches a format of calls.

    Args:
        message: ToolRL's system message, or that of a synthetic row.
        call_format: a key of `call_formats.CALL_FORMATS`.

    Raises:
        ValueError: the message is another one, or a tool in it cannot be read.
    """
    if call_format == TOOLRL:
        return message
    if message.startswith(COMPACT_HEADING):
        tools = _compact_tools(message)
        instructions = OUTPUT
    else:
        listed, instructions = _parts(message)
        tools = _listed_tools(listed)
    return TOOLS_AS[call_format](tools, instructions)


# --- how a template writes tools ------------------------------------------------------------------


def _as_qwen(tools: Sequence[Tool], instructions: str) -> str:
    """As in Qwen2.5 and Qwen3."""
    lines = "\n".join(map(as_json, tools))
    return (
        f"{instructions}\n\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{lines}\n</tools>\n\nFor each function call, return a json object with function "
        "name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )


def _as_qwen3_coder(tools: Sequence[Tool], instructions: str) -> str:
    """As in Qwen3.5, whose tools stand before the instructions."""
    lines = "\n".join(map(as_json, tools))
    return (
        f"# Tools\n\nYou have access to the following functions:\n\n<tools>\n{lines}\n</tools>\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n"
        "</parameter>\n<parameter=example_parameter_2>\n"
        "This is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>"
        "\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
        "Reminder:\n- Function calls MUST follow the specified format: an inner "
        "<function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
        "- Required parameters MUST be specified\n- You may provide optional reasoning for your "
        "function call in natural language BEFORE the function call, but NOT after\n- If there is "
        "no function call available, answer the question like normal with your current knowledge "
        f"and do not tell the user about function calls\n</IMPORTANT>\n\n{instructions}"
    )


def _as_llama3(tools: Sequence[Tool], instructions: str) -> str:
    """As in Llama 3.1 to 3.3, whose template writes what stands before the tools.

    It does so with an empty list of its own, `custom_tools`, because `Environment: ipython` stands
    above its dates, where no message reaches.
    """
    parts = [json.dumps(tool, ensure_ascii=False, indent=4) for tool in tools]
    parts.append(instructions)
    return "\n\n".join(parts)


TOOLS_AS: Mapping[str, Callable[[Sequence[Tool], str], str]] = {
    "hermes": _as_qwen,
    "qwen3_coder": _as_qwen3_coder,
    "llama3_json": _as_llama3,
}

# What Llama's template has to be told to write the line above its dates.
LLAMA_SETTINGS = {"custom_tools": [], "tools_in_user_message": False}
LLAMA_OVERRIDE = (
    "'+data.apply_chat_template_kwargs={custom_tools: [], tools_in_user_message: false}'"
)

# {format: what a run on such rows needs in its configuration}
OVERRIDES = {TOOLRL: ""}
for _name in TOOLS_AS:
    OVERRIDES[_name] = f"+reward.reward_kwargs.call_format={_name}"
OVERRIDES["llama3_json"] += f" {LLAMA_OVERRIDE}"


# --- the tools of a message -----------------------------------------------------------------------


def _parts(message: str) -> tuple[str, str]:
    """Return the list of tools in ToolRL's message, and the instructions around it."""
    before, tools_heading, rest = message.partition(TOOLS_HEADING + TOOLS_LINE)
    listed, steps_heading, rest = rest.partition("\n" + STEPS_HEADING)
    steps, output_heading, _ = rest.partition(OUTPUT_HEADING)
    if not (tools_heading and steps_heading and output_heading):
        raise ValueError(
            f"got {message[:80]!r}...; expected ToolRL's system message, with the sections "
            f"{TOOLS_HEADING.strip()}, {STEPS_HEADING.strip()} and {OUTPUT_HEADING.strip()}"
        )
    return listed, before + STEPS_HEADING + steps + OUTPUT


def _listed_tools(listed: str) -> list[Tool]:
    """Return the tools of ToolRL's list, which has three lines a tool."""
    lines = listed.strip("\n").split("\n")
    tools = []
    for place in range(0, len(lines), len(FIELDS)):
        number = place // len(FIELDS) + 1
        own_lines = lines[place : place + len(FIELDS)]
        name, description, parameters = _fields_of_tool(own_lines, number)
        tools.append(_tool(name, description, _object(parameters, number)))
    return tools


def _fields_of_tool(lines: Sequence[str], number: int) -> list[str]:
    """Return what stands on the lines of a tool: name, description and parameters."""
    values = []
    # A list that is cut off has fewer lines for its last tool.
    for line, field in zip(lines, FIELDS, strict=False):
        beginning = field.format(number)
        if not line.startswith(beginning):
            raise ValueError(f"tool {number}: got the line {line[:80]!r}; expected {beginning}")
        values.append(line.removeprefix(beginning))
    if len(values) < len(FIELDS):
        raise ValueError(f"tool {number}: got {len(values)} lines; expected {len(FIELDS)}")
    return values


def _compact_tools(message: str) -> list[Tool]:
    """Return the tools of a synthetic row, a line each: the name, and {parameter: type}."""
    lines = message.removeprefix(COMPACT_HEADING).strip().split("\n")
    tools = []
    for number, line in enumerate(lines, 1):
        name, _, types = line.partition(" ")
        parameters = {key: {"type": kind} for key, kind in _object(types, number).items()}
        tools.append(_tool(name, "", parameters))
    return tools


def _object(text: str, number: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"tool {number}: got {text[:80]!r}; expected its parameters, an object")
    return value


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """Return a tool as chat templates and verl take it, without what the row does not say."""
    properties = {}
    required = []
    for key, stated in parameters.items():
        if not isinstance(stated, dict):
            raise ValueError(
                f"tool {name!r}, parameter {key!r}: got {stated!r}; expected an object"
            )
        kind = str(stated.get("type", ""))
        if not kind.endswith(OPTIONAL):
            required.append(key)
        schema = _schema(kind.removesuffix(OPTIONAL))
        for field in ("description", "default"):
            if stated.get(field, "") != "":  # ToolRL writes "" for none
                schema[field] = stated[field]
        properties[key] = schema

    of_parameters: dict[str, Any] = {"type": "object", "properties": properties}
    # Only where a row calls some parameters optional, it says something about the others.
    if len(required) < len(properties):
        of_parameters["required"] = required
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = of_parameters
    return {"type": "function", "function": function}


def _schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a type in Python's words; {} for one that has none.

    >>> _schema("List[int]")
    {'type': 'array', 'items': {'type': 'integer'}}
    """
    outer, bracket, inner = kind.strip().partition("[")
    name = SCHEMA_TYPES.get(outer.lower())
    if name is None:
        return {}
    schema: dict[str, Any] = {"type": name}
    if bracket and outer.lower() == "list":
        of_items = _schema(inner.removesuffix("]"))
        if of_items:
            schema["items"] = of_items
    return schema
