"""Reward functions with mistakes, and right ones that look like them, for `verl-gdpo check`."""

import json

import numpy as np


def length_alone(solution_str, **_):
    """As a judge, it needs no ground truth."""
    return {"score": float(len(solution_str) < 20)}


def text_alone(solution_str, **_):
    return "1.0" if solution_str else "0.0"


def text_beside(solution_str, **_):
    return {"a": float(bool(solution_str)), "b": "1.0"}


def text_sometimes(solution_str, **_):
    return {"a": float(bool(solution_str)), "b": 1.0 if solution_str else "1.0"}


def array_beside(solution_str, **_):
    return {"a": float(bool(solution_str)), "b": np.array([1.0])}


def none_beside(solution_str, **_):
    return {"a": float(bool(solution_str)), "b": None}


def with_a_text(solution_str, **_):
    """As verl's `math_dapo` returns what it has found in a response."""
    return {"score": float(len(solution_str) < 20), "acc": len(solution_str) < 20, "pred": "[x]"}


def counts_tokens(extra_info, **_):
    return extra_info["response_tokens"] / 1000


def json_answer(solution_str, ground_truth, **_):
    """It knows JSON of a form that nobody else can know."""
    try:
        return {"right": float(json.loads(solution_str)["result"] == int(ground_truth)), "short": 1}
    except (ValueError, KeyError, TypeError):
        return {"right": 0.0, "short": 0}


def opposites(solution_str, ground_truth, **_):
    """GDPO normalises both to the same size, so that nothing is left of them."""
    right = float(solution_str == ground_truth)
    return {"right": right, "wrong": 1 - right}


def needs_a_split(solution_str, ground_truth, extra_info, **_):
    return float(solution_str == ground_truth and extra_info["split"] == "train")


seen = []


def above_the_mean(solution_str, **_):
    """It compares with all responses that this process has seen."""
    seen.append(len(solution_str))
    return len(solution_str) - sum(seen) / len(seen)
