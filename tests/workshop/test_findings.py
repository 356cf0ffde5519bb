"""The made runs on which the findings are counted: their labels, and the count."""

import math

import numpy as np
import pytest

from workshop.findings.made_runs import (
    HELD_OUT,
    OTHER_HELD_OUT,
    OTHER_TUNING,
    SICK,
    TUNING,
    healthy_runs,
    sick_runs,
)
from workshop.findings.rates import Rate, healthy_rates, sick_rates, table


def test_a_seed_makes_one_run_and_another_makes_another():
    one, again, other = (
        next(healthy_runs(TUNING, 60, range(seed, seed + 1))) for seed in (1, 1, 13)
    )
    assert one.kind == other.kind == [*TUNING.healthy][1]
    assert str(one.rows) == str(again.rows) != str(other.rows)


def test_the_two_parts_have_nothing_in_common():
    assert TUNING.seed != HELD_OUT.seed
    assert not {*TUNING.healthy} & {*HELD_OUT.healthy} and max(HELD_OUT.series) == 20
    shapes = [*TUNING.healthy.values(), *HELD_OUT.healthy.values()]
    assert len({*shapes}) == len(shapes)
    assert len({part.seed for part in (TUNING, HELD_OUT, OTHER_TUNING, OTHER_HELD_OUT)}) == 4
    assert not set(OTHER_HELD_OUT.healthy) & {*TUNING.healthy, *HELD_OUT.healthy}
    assert sum(OTHER_HELD_OUT.lengths.values()) == 600


def test_a_fault_begins_at_its_step():
    for kind, metric in (
        ("gradient infinite", "actor/grad_norm"),
        ("reward the same in all groups", "gdpo/correctness/varies"),
    ):
        for run in sick_runs(HELD_OUT, kind, 75, range(6)):
            values = [of[metric] for step, of in run.rows if step > run.begin]
            assert 26 <= run.begin * 75 / run.steps <= 75
            assert math.isinf(values[-1]) or values[-1] == 0
            early = [of[metric] for step, of in run.rows if step < run.begin]
            assert all(map(math.isfinite, early)) and min(early) > 0


def test_a_restart_repeats_steps_and_loses_one():
    runs = [run for run in healthy_runs(TUNING, 60, range(48)) if run.kind == "restarts"]
    of_runs = [[step for step, _ in run.rows] for run in runs]
    assert all(steps != sorted(steps) and max(steps) == 60 for steps in of_runs)
    # the lost one may be one that is repeated
    assert any({*steps} < {*range(1, 61)} for steps in of_runs)


def test_rates_on_a_few_runs():
    small = TUNING._replace(lengths={60: 12}, sick_rows=(90,))
    every, of_length, *_ = healthy_rates(small)
    assert (every.runs, every.found, of_length.kind, of_length.runs) == (12, 0, "60 steps", 12)
    found = {rate.kind: rate for rate in sick_rates(small, share=0.01)}
    assert {*found} == {*SICK} and all(rate.found == rate.runs == 1 for rate in found.values())
    for rate in found.values():
        assert rate.named[0] <= rate.delays[0], rate.kind


def test_harder_healthy_runs_are_what_their_names_say():
    """A stage of a curriculum begins lower than the last one ended."""
    found = {}
    for run in healthy_runs(OTHER_TUNING, 1200, range(8)):
        means = [values["critic/score/mean"] for _, values in run.rows]
        found[run.kind] = np.array(means)
    assert set(found) == set(OTHER_TUNING.healthy)
    curriculum = found["curriculum"]
    stages = np.array_split(curriculum, 4)
    ends = [np.mean(stage[-10:]) for stage in stages[:-1]]
    begins = [np.mean(stage[:5]) for stage in stages[1:]]
    assert all(begin < end for begin, end in zip(begins, ends, strict=True))


@pytest.mark.parametrize(
    ("is_sick", "found", "missed"),
    [(False, 1, False), (False, 2, True), (True, 45, False), (True, 44, True)],
)
def test_a_goal_that_is_missed(is_sick, found, missed):
    rate = Rate("healthy", is_sick, found, 50)
    assert rate.missed == missed and ("MISSED" in str(rate)) == missed
    assert f"| healthy | 50 | {found / 50:.3f} | " in table([rate])
