"""What a step costs of which a tenth of the programs never end, in each kind of sandbox.

It is computed from the CPU time of one program, and from how long one that never ends holds a core.
"""

import contextlib
import ctypes
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

from verl_gdpo.tasks import sandbox
from verl_gdpo.tasks.coding import score as coding
from verl_gdpo.tasks.coding.problem import good_response, parse
from verl_gdpo.tasks.coding.rows import make_rows
from verl_gdpo.tasks.sandbox.machine import Confinement, confinements
from workshop.benchmarks.measure import Row

PROBLEMS, TESTS, ROUNDS = 8, 10, 5
PROGRAMS, ENDLESS_SHARE, CORES = 8192, 0.1, 64
GOAL_SECONDS = 150.0
PR_SET_CHILD_SUBREAPER = 36
ENDLESS = {"loops": "while True: pass", "sleepers": "import time\ntime.sleep(3600)"}

Pairs = list[tuple[str, str]]  # response, ground truth


def time_rows() -> Iterator[Row]:
    pairs: Pairs = []
    for row in make_rows(PROBLEMS, split="train", seed=0):
        problem = parse(row["reward_model"]["ground_truth"])
        tests = [*problem.tests] * TESTS
        truth = replace(problem, tests=tests[:TESTS]).text()
        pairs.append((good_response(truth), truth))
    for kind in kinds_here():
        with patch.object(sandbox, "_confinement", return_value=kind):
            yield from _of_a_step(kind, pairs)


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
    for response, truth in pairs:
        coding.score(response, truth)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    return (sum(os.times()[:4]) - before) / len(pairs)


def kinds_here() -> list[Confinement]:
    """The first of each name that works on this machine."""
    found: dict[str, Confinement] = {}
    for kind in confinements(allow_weak=True):
        with contextlib.suppress(OSError):
            sandbox._try(kind)
            found.setdefault(kind.name, kind)
    return [*found.values()]


def step_seconds(seconds_of_one: float, seconds_of_endless: float) -> float:
    """How long the cores are busy with the programs of a step, a share of which never end."""
    mean = (1 - ENDLESS_SHARE) * seconds_of_one + ENDLESS_SHARE * seconds_of_endless
    return PROGRAMS * mean / CORES
