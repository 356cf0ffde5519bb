"""Compares our scorer of ToolRL with that of verl, on several kinds of responses."""

import contextlib
import os
import random
import re
from collections.abc import Iterator
from functools import partial

import torch
from verl.utils.reward_score import rlla

from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tasks.tool_rl.form import THINK_CLOSE, TOOL_CALL_CLOSE
from verl_gdpo.tasks.tool_rl.rows import make_rows
from workshop.benchmarks.measure import Row, seconds_of

PAIRS = 500
LONG_THOUGHT = "The user may want this; I go through the tools once more. " * 250
SCORING_GOAL = 1.0  # at least as fast

Pairs = list[tuple[str, str]]  # (response, ground truth)


def responses_to(gold: str) -> list[str]:
    """Return responses that are right, partly wrong, unreadable, and 15,000 characters long."""
    wrong_value = re.sub(r'": (\d+)', r'": "\1"', gold)  # a number in quotes
    call_twice = re.sub(r"\n(\{.*\})\n", r"\n\1\n\1\n", gold, count=1)
    half = gold[: gold.find(TOOL_CALL_CLOSE)][: len(gold) * 3 // 4]
    without_break = gold.replace(f"{THINK_CLOSE}\n", f"{THINK_CLOSE} ")
    no_json, long = (
        gold.replace("}}\n", "}\n"),
        gold.replace(THINK_CLOSE, LONG_THOUGHT + THINK_CLOSE),
    )
    wrong_value = wrong_value.replace("true", "false")
    return [gold, wrong_value, call_twice, without_break, no_json, half, long]


def time_rows() -> Iterator[Row]:
    golds = (row["reward_model"]["ground_truth"] for row in make_rows(PAIRS, split="train", seed=0))
    pairs = [(response, gold) for gold in golds for response in responses_to(gold)]
    state = random.getstate()  # rlla changes it, and prints at random
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        check_agreement(pairs)
        ours, theirs = seconds_of(
            partial(_score_ours, pairs), partial(_score_rlla, pairs), torch.device("cpu")
        )
    random.setstate(state)
    size = f"{len(pairs)} responses"
    yield Row("ToolRL scoring", size, ours, "rlla", theirs, goal=SCORING_GOAL)


def check_agreement(pairs: Pairs) -> None:
    ours, theirs = _score_ours(pairs), _score_rlla(pairs)
    for pair, mine, other in zip(pairs, ours, theirs, strict=True):
        if abs(mine[0] - other[0]) + abs(mine[1] - other[1]) > 1e-9:
            raise AssertionError(f"ours {mine}, rlla {other} for {pair}")


def _score_ours(pairs: Pairs) -> list[tuple[float, float]]:
    scores = [tool_rl.score(response, gold) for response, gold in pairs]
    return [(score["format"], score["correctness"]) for score in scores]


def _score_rlla(pairs: Pairs) -> list[tuple[float, float]]:
    info = {"experiment_name": "qwen"}  # rlla derives the chat format from it
    scores = [rlla.compute_score("rlla", response, gold, info) for response, gold in pairs]
    return [(score["format_reward"], score["accuracy_reward"]) for score in scores]
