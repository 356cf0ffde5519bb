"""Rows as verl's agent loop gives them to a reward manager."""

import numpy as np
import torch
from verl import DataProto

GOLD = '<think> a </think>\n<tool_call>\n{"name": "f", "parameters": {"x": 1}}\n</tool_call>'


class Tokenizer:
    """One token a character; id 0 is special."""

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)


def scored(manager, response="response", truth="42", source="s", **fields):
    """What the manager returns for a row."""
    row = row_of(response, truth, source, **fields)
    return manager.loop.run_until_complete(manager.run_single(row))


def row_of(response, ground_truth=GOLD, data_source="rlla", prompt="Q:", **fields):
    ids = [ord(c) for c in response] + [0]  # the end-of-turn token counts
    prompt_ids = [ord(c) for c in prompt]
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([[7, *prompt_ids]]),
            "responses": torch.tensor([[*ids, 7, 7]]),
            "attention_mask": torch.tensor([[0, *[1] * (len(prompt_ids) + len(ids)), 0, 0]]),
        },
        non_tensors={
            key: np.array([value], dtype=object)
            for key, value in {
                "uid": "u-1",
                "data_source": data_source,
                "reward_model": {"ground_truth": ground_truth, "style": "rule"},
                "extra_info": {"index": 17},
                **fields,
            }.items()
        },
    )
