"""Odd names and values of rewards: they work as the oracle says, or a message names the sample.

To add a case, add it to one of the lists.
"""

import math
import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from stage import oracle_of

from verl_gdpo.algorithm.values import RewardError

A, B, C = {"a": 0, "b": 3}, {"a": 1, "b": 1}, {"a": 2, "b": 0}
PROMPTS = [[A, B], [B, C]]
CONFIGURED = {"algorithm.gdpo.rewards": {"a": 1.0, "b": 1.0}}


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


def one_each(values):
    """Prompts with a sample for each value, and a function that finds it in what the model said."""
    prompts = [[A, B, C], [{"a": number % 3, "b": number} for number in range(len(values))]]
    return prompts, lambda said: values[said["b"]]


NUMBERS = [
    *(np.float32(4), np.int64(4), np.array(4.0), np.bool_(True), True, 4.0 + 1e-300),
    *(torch.tensor(4), torch.tensor([4.0]), torch.tensor(True), Decimal(4), Fraction(8, 2)),
]


def test_numbers_of_all_types(stage):
    prompts, odd = one_each(NUMBERS)
    played = stage.train(prompts, lambda said: {**said, "b": odd(said)}, settings=CONFIGURED)
    plain = [[{**said, "b": float(odd(said))} for said in group] for group in prompts]
    assert played.advantages == oracle_of(plain)


NO_NUMBERS = [
    *(math.nan, math.inf, -math.inf, 10**400, "4", b"4", 4j, {4}, [4.0], {"x": 4.0}, object()),
    *(WithoutRepr(), np.array([4.0, 4.0]), torch.tensor([4.0, 4.0]), np.float32("nan")),
    *(torch.tensor(math.inf), "\ud800", "x" * 100_000),
]


def test_what_is_no_number_stops_the_run(stage):
    prompts, odd = one_each(NO_NUMBERS)
    prompts = prompts[1:]
    with pytest.raises(RewardError, match=f"{len(NO_NUMBERS)} of {len(NO_NUMBERS)} samples"):
        stage.train(prompts, lambda said: {**said, "b": odd(said)}, settings=CONFIGURED)
    for message in stage.errors().values():
        assert re.search(r"extra_info.index 0: reward 'b' is .*expected a finite number", message)


LOGGED = [
    *(math.nan, -math.inf, 10**400, "\ud800", b"\xff", {4}, [1, [2]], [], {"x": {1: 2}}, None),
    *(object(), WithoutRepr(), np.arange(3), torch.ones(2), "x" * 100_000, {("t",): 1}, len),
]


@pytest.mark.parametrize("names", [["trace"], [*map(str, range(len(LOGGED)))]], ids=len)
def test_what_is_only_logged_stops_nothing(stage, names):
    """All values under one name, or each value under a name that the other samples lack."""

    def score(said):
        return {**said, names[said["b"] % len(names)]: odd(said)} if "b" in said else said

    prompts, odd = one_each(LOGGED)
    played = stage.train(prompts, score, settings=CONFIGURED)
    assert played.advantages == oracle_of(prompts)
    metrics, rows = stage.validate(prompts[1:], score, settings=CONFIGURED)
    assert metrics[f"val-aux/d/b/mean@{len(LOGGED)}"] == (len(LOGGED) - 1) / 2
    assert len(rows) == len(LOGGED)


TAKEN = ["reward", "uid", "step", "input", "output", "gts", 1, None, ("t",), "", "a/b", b"c", 2.5]


@pytest.mark.parametrize("play", ["train", "validate"])
def test_a_name_that_verl_uses_is_refused(stage, play):
    """In verl's validation, a reward called `reward` would give 5.667 in the place of 10.5."""
    prompts, name = one_each(TAKEN)
    prompts = prompts[1:]
    with pytest.raises(RewardError, match=f"{len(TAKEN)} of {len(TAKEN)} samples"):
        getattr(stage, play)(prompts, lambda said: {"a": 1.0, name(said): 2.0})
    errors = stage.errors("train" if play == "train" else "val")
    for (_, session), message in errors.items():
        assert f"extra_info.index 0: name {TAKEN[session]!r}" in message


WORKS = ["summary", "acc", "advantage", "rewards", "Größe 1", "mean@2", "a=b", "x.y", "None", "is"]


def test_other_names_work(stage):
    def score(said):
        return {name: said["a"] + said["b"] ** place for place, name in enumerate(WORKS)}

    played = stage.train(PROMPTS, score)
    returned = [[score(said) for said in group] for group in PROMPTS]
    assert played.advantages == oracle_of(returned)
    metrics, rows = stage.validate(PROMPTS, score)
    for name in WORKS:
        values = sorted(one[name] for group in returned for one in group)
        assert sorted(row["rewards"][name] for row in played.rows) == values
        assert sorted(row[name] for row in rows) == values
        section = "core" if name == "acc" else "aux"
        assert metrics[f"val-{section}/d/{name}/mean@2"] == sum(values) / 4
