"""Rows and starting policies of the recipes' own tasks, of which each seed has its own."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from verl_gdpo.tasks.coding import rows as coding
from verl_gdpo.tasks.coding.problem import parse
from verl_gdpo.tasks.gsm8k import rows as gsm8k
from verl_gdpo.tasks.math_length import rows as math_length
from verl_gdpo.tasks.preparation.local_files import numbered
from verl_gdpo.tasks.preparation.schema import SCHEMA
from verl_gdpo.tasks.preparation.sources import MakeRows
from verl_gdpo.tasks.tool_rl import rows as tool_rl
from workshop.tiny_policy.train import make_policy

Row = dict[str, Any]
Spoil = Callable[[str, Sequence[str], random.Random], str]
ROWS = 16  # few, so that 30 steps show each of them often
COPIES = 16  # of a row, each with faults of its own
WRONG, SPELT, BROKEN = 0.5, 0.4, 0.25  # shares of the demonstrations with such a fault
HIDDEN_SIZE, LAYERS = 64, 2  # of the policy
TOOL_RL_ROWS = 2000


def _wrong(truth: str, truths: Sequence[str], chance: random.Random) -> str:
    return chance.choice(truths) if chance.random() < WRONG else truth


def _spoil_gsm8k(truth: str, truths: Sequence[str], chance: random.Random) -> str:
    """Another result, or the result in a form that changes whether it is digits alone."""
    truth = _wrong(truth, truths, chance)
    if chance.random() >= SPELT:
        return truth
    return truth.replace(",", "") if "," in truth else f"{truth}.0"


def _spoil_coding(truth: str, truths: Sequence[str], chance: random.Random) -> str:
    """Another problem's solution, or one that does not compile."""
    problem = parse(truth)
    alike = [other for other in map(parse, truths) if other.function == problem.function]
    solution = chance.choice(alike).solution if chance.random() < WRONG else problem.solution
    assert solution is not None  # made problems have one
    if chance.random() < BROKEN:
        solution = solution.replace(")", "", 1)
    return replace(problem, solution=solution).text()


class Kind(NamedTuple):
    """How the inputs of a task are made: its rows, what spoils an answer, and supervised steps."""

    make_rows: MakeRows
    spoil: Spoil
    steps: int


KINDS = {
    "gsm8k": Kind(gsm8k.make_rows, _spoil_gsm8k, 300),
    "math_length": Kind(math_length.make_rows, _wrong, 600),
    "coding": Kind(coding.make_rows, _spoil_coding, 300),
}


def make_inputs(task: str, folder: Path, seed: int) -> None:
    """Write the rows and the policy of a seed where the CPU recipe of the task looks for them."""
    data, policy = folder / f"{task}_tiny", folder / f"{task}_policy"
    if task == "tool_rl":  # which copies what is asked for, so it needs no row twice
        write_rows([*tool_rl.make_rows(TOOL_RL_ROWS, split="train", seed=seed)], data)
        make_policy(policy, seed=seed)
        return
    kind = KINDS[task]
    rows = [*kind.make_rows(ROWS, split="train", seed=seed)]
    truths, chance = [row["reward_model"]["ground_truth"] for row in rows], random.Random(seed)
    shown = []
    for row in rows * COPIES:
        truth = kind.spoil(row["reward_model"]["ground_truth"], truths, chance)
        shown.append({**row, "reward_model": {**row["reward_model"], "ground_truth": truth}})
    write_rows(rows, data)
    write_rows(shown, folder / "shown")
    make_policy(
        policy,
        seed=seed,
        data=folder / "shown" / "train.parquet",
        steps=kind.steps,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
    )


def write_rows(rows: Sequence[Row], folder: Path) -> None:
    """Write the two files that a recipe names; verl reads the test rows, and none is validated."""
    for split in ("train", "test"):
        table = pa.Table.from_pylist(numbered(rows, split), schema=SCHEMA)
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, folder / f"{split}.parquet")
