"""Compares our scorers with those of verl for the same tasks, on several kinds of responses."""

import contextlib
import os
import random
import re
from collections.abc import Iterator
from functools import partial

import torch
from verl.utils.reward_score import gsm8k as verls_gsm8k
from verl.utils.reward_score import math_verify as verls_math_verify
from verl.utils.reward_score import rlla

from verl_gdpo.tasks.gsm8k import score as gsm8k
from verl_gdpo.tasks.gsm8k.rows import make_rows as make_gsm8k_rows
from verl_gdpo.tasks.math_length import score as math_length
from verl_gdpo.tasks.tool_rl import score as tool_rl
from verl_gdpo.tasks.tool_rl.form import THINK_CLOSE, TOOL_CALL_CLOSE
from verl_gdpo.tasks.tool_rl.rows import make_rows
from workshop.benchmarks.measure import Row, seconds_of

PAIRS = 500
LONG_THOUGHT = "The user may want this; I go through the tools once more. " * 250
SCORING_GOAL = 1.0  # at least as fast

Pairs = list[tuple[str, str]]  # (response, ground truth)


def responses_to(gold: str) -> dict[str, str]:
    """Return {kind: response}: right, partly wrong, unreadable, and 15,000 characters long."""
    wrong_value = re.sub(r'": (\d+)', r'": "\1"', gold)  # a number in quotes
    call_twice = re.sub(r"\n(\{.*\})\n", r"\n\1\n\1\n", gold, count=1)
    half = gold[: gold.find(TOOL_CALL_CLOSE)][: len(gold) * 3 // 4]
    return {
        "correct": gold,
        "wrong value": wrong_value.replace("true", "false"),
        "a call too many": call_twice,
        "no line break": gold.replace(f"{THINK_CLOSE}\n", f"{THINK_CLOSE} "),
        "not JSON": gold.replace("}}\n", "}\n"),
        "cut off": half,
        "long": gold.replace(THINK_CLOSE, LONG_THOUGHT + THINK_CLOSE),
    }


def time_rows() -> Iterator[Row]:
    yield from tool_rl_rows()
    yield from gsm8k_rows()
    yield from math_rows()


def gsm8k_rows() -> Iterator[Row]:
    """Each scorer is given the layout that it reads; verl's, which has one reward, the shorter."""
    rows = make_gsm8k_rows(PAIRS, split="train", seed=0)
    golds = [row["reward_model"]["ground_truth"].replace(",", "") for row in rows]
    for kind, thought in {"short": "Step by step.", "15,000 characters": LONG_THOUGHT}.items():
        ours, theirs = [], []
        for i, gold in enumerate(golds):
            answer = gold if i % 2 else f"{gold}1"
            ours.append((f"<think>{thought}</think>\n<answer>{answer}</answer>", gold))
            theirs.append((f"{thought}\n#### {answer}", gold))
        score_ours, score_verls = partial(_correct_gsm8k, ours), partial(_correct_verls, theirs)
        if score_ours() != score_verls():
            raise AssertionError(f"GSM8K, {kind}: ours and verl's differ")
        times = seconds_of(score_ours, score_verls, torch.device("cpu"))
        size = f"{PAIRS} responses, {kind}"
        yield Row("GSM8K scoring", size, times[0], "verl's gsm8k, correctness alone", times[1])


def math_rows() -> Iterator[Row]:
    """Both by math-verify in processes of their own, asked by one thread."""
    golds = [r"\frac{14}{3}", "x^2 - 2x + 1", r"\sqrt{8}", "27"]
    others = [r"14/3", "(x-1)^2", r"2\sqrt{2}", "28"]
    for kind, thought in {"short": "So.", "15,000 characters": LONG_THOUGHT}.items():
        pairs = [
            (f"{thought} \\boxed{{{other}}}", gold)
            for _ in range(25)
            for gold, other in zip(golds, others, strict=True)
        ]
        ours, theirs = partial(_correct_math, pairs), partial(_correct_math_verify, pairs)
        if ours() != theirs():
            raise AssertionError(f"maths, {kind}: ours and verl's differ")
        times = seconds_of(ours, theirs, torch.device("cpu"))
        yield Row(
            "maths scoring", f"100 responses, {kind}", times[0], "verl's math_verify", times[1]
        )


def _correct_math(pairs: Pairs) -> list[float]:
    scores = (math_length.score(response, gold, response_tokens=1) for response, gold in pairs)
    return [score["correctness"] for score in scores]


def _correct_math_verify(pairs: Pairs) -> list[float]:
    return [verls_math_verify.compute_score(response, gold) for response, gold in pairs]


def _correct_gsm8k(pairs: Pairs) -> list[float]:
    return [gsm8k.score(response, gold)["correctness"] for response, gold in pairs]


def _correct_verls(pairs: Pairs) -> list[float]:
    return [verls_gsm8k.compute_score(response, gold) for response, gold in pairs]


def tool_rl_rows() -> Iterator[Row]:
    pairs_of: dict[str, Pairs] = {}
    for row in make_rows(PAIRS, split="train", seed=0):
        gold = row["reward_model"]["ground_truth"]
        for kind, response in responses_to(gold).items():
            pairs_of.setdefault(kind, []).append((response, gold))
    pairs_of["all of these"] = [pair for pairs in pairs_of.values() for pair in pairs]
    state = random.getstate()  # rlla changes it, and prints at random
    with open(os.devnull, "w") as nowhere:
        for kind, pairs in pairs_of.items():
            with contextlib.redirect_stdout(nowhere):
                check_agreement(kind, pairs)
                ours, theirs = seconds_of(
                    partial(_score_ours, pairs), partial(_score_rlla, pairs), torch.device("cpu")
                )
            size = f"{len(pairs)} responses, {kind}"
            goal = SCORING_GOAL if kind == "all of these" else None
            yield Row("ToolRL scoring", size, ours, "rlla", theirs, goal=goal)
    random.setstate(state)


def check_agreement(kind: str, pairs: Pairs) -> None:
    ours, theirs = _score_ours(pairs), _score_rlla(pairs)
    for pair, mine, other in zip(pairs, ours, theirs, strict=True):
        if abs(mine[0] - other[0]) + abs(mine[1] - other[1]) > 1e-9:
            raise AssertionError(f"{kind}: ours {mine}, rlla {other} for {pair}")


def _score_ours(pairs: Pairs) -> list[tuple[float, float]]:
    scores = [tool_rl.score(response, gold) for response, gold in pairs]
    return [(score["format"], score["correctness"]) for score in scores]


def _score_rlla(pairs: Pairs) -> list[tuple[float, float]]:
    info = {"experiment_name": "qwen"}  # rlla derives the chat format from it
    scores = [rlla.compute_score("rlla", response, gold, info) for response, gold in pairs]
    return [(score["format_reward"], score["accuracy_reward"]) for score in scores]
