"""The policy of the no-GPU run: a tiny Qwen2, taught tool calls from imperfect demonstrations.

    python -m verl_gdpo.cpu.warm_start --out DIR [--seed S] [--data train.parquet]

Reinforcement learning needs a policy that is sometimes right. This one learns to read a request
and copy its tool, keys and values, from demonstrations with three independent bad habits (see
`HABITS`). Two of them are in the majority, so that the policy's most likely answer has them too:
training on the rewards has something to unlearn, in its samples and in its greedy answers.

The same arguments, code, library versions, number of threads and kind of CPU give the same files,
byte for byte. A finished policy is recognised by `MARKER` and not trained again.
"""

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from verl_gdpo.cpu.tiny_model import TURN_END, make_tiny_model
from verl_gdpo.rewards import tool_rl_format as contract

MARKER = "warm_start.json"
# how many demonstrations have it, and what it does to the text of a good answer
HABITS: dict[str, tuple[float, str, str]] = {
    "no line break after the thought": (0.55, f"{contract.THINK_CLOSE}\n", f"{contract.THINK_CLOSE} "),
    "numbers in quotes": (0.6, r'": (\d+)', r'": "\1"'),
    "a closing brace is missing": (0.3, r"\}\}\n", "}\n"),
}
ROWS = 16384
POOL_BATCHES = 16  # batches are cut from this many batches' rows, sorted by length
# pieces of prompts and answers that are one token, so that sequences stay short
WHOLE_TOKENS = (
    *("Tools:\n", ' {"', '": "string", "', '": "integer", "', '": "string"}', '": "integer"}'),
    *(': "', '" is "', '" is ', '", "', ', "', "; ", '"; '),
    *("<think> ", " </think>\n", " </think> ", "<tool_call>\n", "</tool_call>"),
    *("<response> ", " </response>", '{"name": "', '", "parameters": {"', '": "', '": '),
    *('"}}\n', "}}\n", '"}\n', "}\n"),
)
