"""Scoring of programs against verl's `prime_code`, which runs them as the user who trains.

And what a step costs of which a tenth of the programs never end, in each kind of sandbox that works
here: computed from the CPU time of one program, and from how long one that never ends holds a core.
"""

import contextlib
import ctypes
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from verl.utils.reward_score import prime_code

from verl_gdpo import sandbox
from verl_gdpo.sandbox.machine import Confinement, confinements
from verl_gdpo.tasks.coding import score as coding
from verl_gdpo.tasks.coding.problem import good_response, parse
from verl_gdpo.tasks.coding.rows import make_rows
from workshop.benchmarks.measure import Row, seconds_of

PROBLEMS, TESTS, ROUNDS = 8, 10, 5
PROGRAMS, ENDLESS_SHARE, CORES = 8192, 0.1, 64
GOAL_SECONDS = 150.0
PR_SET_CHILD_SUBREAPER = 36
ENDLESS = {"loops": "while True: pass", "sleepers": "import time\ntime.sleep(3600)"}

Pairs = list[tuple[str, str]]  # response, ground truth


def responses_to(truth: str) -> dict[str, str]:
    """What a policy says: right, wrong in each test, and not even a program."""
    good = good_response(truth)
    nonsense = good.replace("print(", "print('no', ").replace("return ", "return -999 + ")
    return {"right": good, "wrong": nonsense, "no syntax": good.replace("(", "[", 1)}


def time_rows() -> Iterator[Row]:
    pairs_of: dict[str, Pairs] = {}
    for row in make_rows(PROBLEMS, split="train", seed=0):
        problem = parse(row["reward_model"]["ground_truth"])
        tests = [*problem.tests] * TESTS
        truth = replace(problem, tests=tests[:TESTS]).text()
        for what, response in responses_to(truth).items():
            pairs_of.setdefault(what, []).append((response, truth))
    for kind in kinds_here():
        with patch.object(sandbox, "_confinement", return_value=kind):
            yield from _of_a_step(kind, pairs_of["right"])
    for what, pairs in pairs_of.items():
        yield _compared(what, pairs)


def _of_a_step(kind: Confinement, pairs: Pairs) -> Iterator[Row]:
    cpu_seconds = min(_cpu_seconds(pairs) for _ in range(ROUNDS))
    for what, program in ENDLESS.items():
        begin, notes = time.perf_counter(), sandbox.ExecutionNotes()
        coding.score(f"```python\n{program}\n```", pairs[0][1], notes=notes)
        held = time.perf_counter() - begin - notes.seconds_waited
        seconds = step_seconds(cpu_seconds, held)
        yield Row(
            f"a step's programs, {kind.name}, computed",
            f"{PROGRAMS:,} of {cpu_seconds * 1000:.0f} ms of CPU time, {ENDLESS_SHARE:.0%} of them "
            f"{what}, on {CORES} cores",
            *(seconds, "the goal", GOAL_SECONDS),
            goal=1.0,
        )


def _cpu_seconds(pairs: Pairs) -> float:
    """CPU time of a program, in all processes: other work on the machine adds little to it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # bubblewrap waits for no process of its own
    before = sum(os.times()[:4])
    _score_ours(pairs)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return (sum(os.times()[:4]) - before) / len(pairs)


def kinds_here() -> list[Confinement]:
    """The first of each name that works on this machine."""
    found: dict[str, Confinement] = {}
    for kind in confinements(allow_weak=True):
        try:
            sandbox._try(kind)
        except OSError:
            continue
        found.setdefault(kind.name, kind)
    return [*found.values()]


def step_seconds(seconds_of_one: float, seconds_of_endless: float) -> float:
    """How long the cores are busy with the programs of a step, a share of which never end."""
    mean = (1 - ENDLESS_SHARE) * seconds_of_one + ENDLESS_SHARE * seconds_of_endless
    return PROGRAMS * mean / CORES


def _compared(what: str, pairs: Pairs) -> Row:
    ours, theirs = _score_ours(pairs), _score_verls(pairs)
    if ours != theirs:
        raise AssertionError(f"{what}: ours {ours}, verl's {theirs}")
    times = seconds_of(
        partial(_score_ours, pairs), partial(_score_verls, pairs), torch.device("cpu")
    )
    size = f"{len(pairs)} responses of {TESTS} tests, {what}"
    return Row("coding", size, times[0], "prime_code", times[1])


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
