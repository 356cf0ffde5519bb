"""The made runs on which the findings are counted: their labels, and the count."""

import math

import pytest

from workshop.findings import rates as module
from workshop.findings.made_runs import HEALTHY, WRECKED, healthy_runs, wrecked_runs
from workshop.findings.rates import NAMED, Rate, rates, table


def test_a_seed_makes_one_run_and_another_makes_another():
    one, again, other = (next(healthy_runs(range(seed, seed + 1), 60)) for seed in (1, 1, 12))
    assert one.kind == other.kind == HEALTHY[1]
    assert str(one.rows) == str(again.rows) != str(other.rows)


def test_a_fault_is_there_from_its_onset_on():
    [*runs] = wrecked_runs(range(2), 60)
    assert {run.kind for run in runs} == {*WRECKED} == {*NAMED}
    for run in runs:
        assert 15 <= run.begin <= run.onset <= 60
        if run.kind == "gradient norm 22,000":
            norms = {step: values["actor/grad_norm"] for step, values in run.rows}
            assert all((norms[step] > 1000) == (step >= run.onset) for step in norms)
        if run.kind.startswith("reward is NaN"):
            scores = [values["critic/score/mean"] for step, values in run.rows if step > run.onset]
            assert all(map(math.isnan, scores[:29]))


def test_a_restart_repeats_steps_and_loses_one():
    runs = [run for run in healthy_runs(range(44), 60) if run.kind == "restarts"]
    of_runs = [[step for step, _ in run.rows] for run in runs]
    assert all(steps != sorted(steps) and max(steps) == 60 for steps in of_runs)
    # the lost one may be one that is repeated
    assert any({*steps} < {*range(1, 61)} for steps in of_runs)


def test_rates_on_a_few_runs(monkeypatch):
    monkeypatch.setattr(module, "LENGTHS", (60,))
    found = {(rate.kind, rate.steps): rate for rate in rates(0, part=0.03)}
    assert found["healthy", "60"].runs == 15
    assert all(found[kind, "60"].found == found[kind, "60"].runs == 1 for kind in WRECKED)


@pytest.mark.parametrize(
    ("goal", "found", "missed"),
    [("<= 0.05", 1, False), ("<= 0.05", 2, True), (">= 0.8", 16, False), (">= 0.8", 15, True)],
)
def test_a_goal_that_is_missed(goal, found, missed):
    rate = Rate("healthy", "60", goal, found, 20)
    assert rate.missed == missed
    assert ("NO" in table([rate])) == missed
