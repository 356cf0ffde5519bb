"""A row of tool calling, as small as can be."""

import json

from verl_gdpo.tasks.preparation.local_files import placed


def tool_row(index, split, *, data_source="rlla"):
    city = ["Oslo", "Lima", "Kyiv", "Bern"][index % 4]
    call = json.dumps({"name": "weather", "parameters": {"city": city}})
    return {
        "data_source": data_source,
        "prompt": [
            {"role": "system", "content": "Call a tool."},
            {"role": "user", "content": f"Weather in {city}?"},
        ],
        "ability": "tool",
        "reward_model": {
            "style": "rule",
            "ground_truth": f"<think> look </think>\n<tool_call>\n{call}\n</tool_call>",
        },
        "extra_info": {"index": index, "split": split},
    }


def numbered(rows, split):
    return [placed(row, index, split) for index, row in enumerate(rows)]
