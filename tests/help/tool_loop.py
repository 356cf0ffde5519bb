"""verl's tool agent loop with a tool of ours, for a policy that writes `parameters`.

verl's parsers read `arguments`, and would find no call. Odd sessions have two outputs: verl's loop
returns one, so a loop of ours calls it twice.
"""

import json
import re

from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

LOOPS = "- {name: tools_twice, _target_: tool_loop.ToolsTwice}\n"
BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)
ANSWER, REFUSAL = "fine", "closed"


def tools_config(names):
    """The content of a file for `multi_turn.tool_config_path`."""
    empty = {"type": "object", "properties": {}, "required": []}
    tools = [
        {
            "class_name": "tool_loop.Tool",
            "config": {"type": "native"},
            "tool_schema": {
                "type": "function",
                "function": {"name": name, "description": "", "parameters": empty},
            },
        }
        for name in names
    ]
    return json.dumps({"tools": tools})


@ToolParser.register("parameters")
class ParametersParser(ToolParser):
    """A call is a line of JSON with `name` and `parameters`."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        text = self.tokenizer.decode(responses_ids)
        calls = []
        for block in BLOCK.findall(text):
            for line in block.strip().splitlines():
                try:
                    call = json.loads(line)
                    name, arguments = call["name"], json.dumps(call["parameters"])
                except (ValueError, LookupError, TypeError):
                    name, arguments = "no_call", line
                calls.append(FunctionCall(name=str(name), arguments=arguments))
        return BLOCK.sub("", text), calls


class Tool(BaseTool):
    """Answers, or raises if the arguments have an odd length."""

    async def execute(self, instance_id, parameters, **kwargs):
        if len(json.dumps(parameters)) % 2:
            raise ValueError(REFUSAL)
        return ToolResponse(text=ANSWER), 0.0, {}


class ToolsTwice(ToolAgentLoop):
    async def run(self, sampling_params, session_id, **kwargs):
        last = await super().run(sampling_params, **kwargs)
        if session_id % 2 == 0:
            return last
        return [await super().run(sampling_params, **kwargs), last]
