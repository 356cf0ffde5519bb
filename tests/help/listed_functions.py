"""A file of reward functions, and lists of them, as verl's reward worker calls them."""

import re

from repository import REPO
from reward_rows import Tokenizer, scored
from run_config import listed

from verl_gdpo.hooks.reward_manager import GdpoRewardManager

PAGE = REPO / "docs" / "rewards.md"
FILE = """
import asyncio

calls = []

def length(solution_str, limit=10):
    calls.append("length")
    return float(len(solution_str) <= limit)

async def judge(data_source, solution_str, ground_truth, extra_info, **kwargs):
    await asyncio.sleep(0)
    return {"clear": 0.5, "kind": 1.0, "why": f"{data_source} {ground_truth} {sorted(kwargs)}"}

def whole(solution_str):
    return {"score": 1.5, "a": 1.0, "b": 0.5}

def lone(solution_str):
    return {"score": 1.5, "note": "text"}

def wrong_sum(solution_str):
    return {"score": 9.0, "a": 1.0}

def none(solution_str):
    return None

running = {"limited": 0, "free": 0}
most = dict(running)

async def counts(solution_str, kind):
    running[kind] += 1
    most[kind] = max(most[kind], running[kind])
    await asyncio.sleep(0.01)
    running[kind] -= 1
    return 1.0

def fails(solution_str):
    raise KeyError("a bug")

def with_reason(solution_str):
    return 0.5, "because"

def in_words(solution_str):
    return "good"

def needs(solution_str, threshold):
    return 0.0

def by_position(solution_str, /):
    return 0.0

def anything(*args):
    return 0.0

def named_as_positions(*prompt, solution_str, **extra_info):
    return float(not prompt and {*extra_info} == {"data_source", "ground_truth", "extra_info"})

in_c = min

def two(solution_str):
    if "fail" in solution_str:
        raise KeyError("a bug")
    return {"x": 1.0, "y": float(len(solution_str))}

def number(solution_str):
    if "fail" in solution_str:
        raise KeyError("a bug")
    return 2.0

def is_right(solution_str, ground_truth):
    if "fail" in solution_str:
        raise KeyError("a bug")
    return float(ground_truth in solution_str)

def style(solution_str):
    if "fail" in solution_str:
        raise KeyError("a bug")
    return {"clear": 1.0, "brief": 1.0, "why": "text"}

def fails_for_a_group(solution_strs):
    raise KeyError("a bug")

def judge_by_rubric(solution_str):
    if "fail" in solution_str:
        raise KeyError("a bug")
    return {"a": 1.0, "b": 0.0}

def sum_of_nothing(solution_str):
    return {"score": 0.0, "right": None, "fmt": None}

def no_score(solution_str):
    return {"score": None, "right": 1.0}

def sum_of_one(solution_str):
    return {"score": 1.0, "right": None, "fmt": 1.0}

def not_the_sum(solution_str):
    return {"score": 1.0, "right": None}
"""


def config_of(entries, **algorithm):
    return listed(entries, algorithm=algorithm)


def manager_of(config):
    return GdpoRewardManager(config, Tokenizer(), None)


def score(config, **fields):
    return scored(manager_of(config), global_steps=1, **fields)


def written(folder):
    """The path of the functions above, and of the one of docs/rewards.md that compares a group."""
    path = folder / "my_rewards.py"
    example = re.search(r"```python\n(async def rank.*?)```", PAGE.read_text(), re.DOTALL)[1]
    path.write_text(FILE + example)
    return str(path)
