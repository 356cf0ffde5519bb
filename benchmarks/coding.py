"""Scoring of programs against verl's `prime_code`, which runs them as the user who trains."""

import json
from collections.abc import Iterator
from functools import partial

import torch
from verl.utils.reward_score import prime_code

from benchmarks.measure import Row, seconds_of
from verl_gdpo.data_prep.coding_synthetic import make_rows
from verl_gdpo.rewards import coding, sandbox
from verl_gdpo.rewards.coding_problem import good_response, parse

PROBLEMS = 8

Pairs = list[tuple[str, str]]  # response, ground truth


def responses_to(truth: str) -> dict[str, str]:
    """What a policy says: right, wrong in each test, and not even a program."""
    good = good_response(truth)
    nonsense = good.replace("print(", "print('no', ").replace("return ", "return -999 + ")
    return {"right": good, "wrong": nonsense, "no syntax": good.replace("(", "[", 1)}


def time_rows() -> Iterator[Row]:
    sandbox.missing()  # finds the sandbox
    pairs_of: dict[str, Pairs] = {}
    for row in make_rows(PROBLEMS, split="train", seed=0):
        truth = row["reward_model"]["ground_truth"]
        for kind, response in responses_to(truth).items():
            pairs_of.setdefault(kind, []).append((response, truth))
    for kind, pairs in pairs_of.items():
        if _score_ours(pairs) != _score_verls(pairs):
            raise AssertionError(f"{kind}: ours {_score_ours(pairs)}, verl's {_score_verls(pairs)}")
        ours, theirs = seconds_of(
            partial(_score_ours, pairs), partial(_score_verls, pairs), torch.device("cpu")
        )
        size = f"{len(pairs)} responses of 4 tests, {kind}"
        yield Row("coding", size, ours, "prime_code", theirs)


def _score_ours(pairs: Pairs) -> list[float]:
    return [coding.score(response, truth)["pass"] for response, truth in pairs]


def _score_verls(pairs: Pairs) -> list[float]:
    return [float(prime_code.compute_score(r, _form(t), continuous=True)[0]) for r, t in pairs]


def _form(truth: str) -> dict[str, object]:
    """The ground truth as verl writes it."""
    problem = parse(truth)
    if problem.function is None:
        inputs = [test["input"] for test in problem.tests]
        return {"inputs": inputs, "outputs": [test["output"] for test in problem.tests]}
    return {
        "fn_name": problem.function,
        "inputs": ["\n".join(map(json.dumps, test["args"])) for test in problem.tests],
        "outputs": [json.dumps(test["accepted"][0]) for test in problem.tests],
    }
