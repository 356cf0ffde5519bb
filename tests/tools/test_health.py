"""The first line of the page: healthy, look at this, or broken, and why."""

import math

import pytest
from made_arms import made_arm
from run_folder_writer import make_run

from verl_gdpo.run.starts import StartManifest, ended, write
from verl_gdpo.tools.report.arms import read_arms
from verl_gdpo.tools.report.charts import sections
from verl_gdpo.tools.report.health import all_remarks, verdict


def line_of(*arms):
    return verdict(all_remarks(arms, sections(arms)[0].charts), arms)


def arm(name="gdpo", steps=60, **values):
    """`values` are numbers, or functions of the step."""
    values = {"gdpo/a/mean": 0.5, **values}
    at = lambda step: {k: v(step) if callable(v) else v for k, v in values.items()}  # noqa: E731
    return made_arm(name, {step: at(step) for step in range(1, steps + 1)})


def after(step, value, usual):
    return lambda now: value if now > step else usual


def test_a_healthy_run_is_healthy():
    assert line_of(arm()) == ("healthy", "no rule finds anything in 60 steps")
    assert line_of(arm(steps=19))[1].endswith("in 19 steps, which are too few for most rules")
    two = arm(), arm("grpo")
    assert line_of(*two) == ("healthy", "no rule finds anything in 60 steps")
    assert [(one.level, one.text) for one in all_remarks(two, [])] == [
        ("note", "One run per arm: differences may be chance")
    ]


def test_without_names_of_rewards_it_says_what_no_rule_sees():
    metrics = {step: {"critic/score/mean": 0.5} for step in range(30)}
    _, why = line_of(made_arm("mine", metrics))
    assert why.endswith("without the metrics of verl-gdpo, no rule on each reward sees mine0")


@pytest.mark.parametrize(
    ("level", "values", "why"),
    [
        ("broken", {"actor/grad_norm": after(40, 22_000.0, 0.3)}, "the gradient norm is"),
        ("broken", {"actor/entropy": after(40, 1e-6, 0.5)}, "the entropy is 1e-06"),
        ("broken", {"gdpo/a/mean": after(40, math.nan, 0.5)}, "gdpo/a/mean is NaN"),
        ("broken", {"response/aborted_ratio": 0.9}, "90% of the responses are empty"),
        ("look at this", {"actor/pg_clipfrac": after(40, 0.7, 0.01)}, "70% of the tokens are"),
        # it is over: nothing is broken now
        (
            "look at this",
            {"actor/grad_norm": lambda step: 22_000.0 if 20 < step < 30 else 0.3},
            "the gradient norm was",
        ),
    ],
)
def test_what_is_wrong_is_the_first_line(level, values, why):
    found, said = line_of(arm(**values))
    assert found == level and said.startswith(why)


def test_the_worst_comes_first_and_the_others_are_counted():
    values = {"actor/pg_clipfrac": after(40, 0.7, 0.01), "actor/entropy": after(45, 1e-6, 0.5)}
    arms = arm(**values), arm("grpo")
    level, why = line_of(*arms)
    assert (level, why.startswith("gdpo0: the entropy"), why[-14:]) == (
        "broken",
        True,
        "; 1 more below",
    )
    charts = sections(arms)[0].charts
    broken, look, note = all_remarks(arms, charts)
    assert (broken.first, broken.last, look.first, note.last) == (46, 60, 41, 0)
    assert broken.chart == next(chart.id for chart in charts if chart.title == "Entropy")


def test_arms_of_unequal_length_are_to_be_looked_at():
    level, why = line_of(arm(steps=20), arm("grpo"))
    assert level == "look at this"
    assert why == "the runs end at different steps (gdpo at 20; grpo at 60)"
    [said, _] = all_remarks((arm(steps=20), arm("grpo")), [])
    assert "up to step 20, the last one that all runs have" in said.advice


@pytest.mark.parametrize(
    ("code", "level"),
    [
        *((0, "healthy"), (1, "broken"), (None, "healthy")),
        *((124, "look at this"), (130, "look at this"), (143, "look at this")),  # wanted
        *((134, "broken"), (137, "broken"), (139, "broken")),  # such as out of memory
    ],
)
def test_a_training_that_stopped_is_said_before_its_metrics(tmp_path, code, level):
    run = make_run(tmp_path / "run", steps=30)
    write(run, StartManifest("2026-01-02T03:04:05+00:00", {}, {}), "algorithm: {}\n")
    if code is not None:
        ended(run, "RolloutError: a worker died" if code == 1 else "", code)
    found, why = line_of(*read_arms([run]))
    assert found == level
    if code == 1:
        assert why == "the training stopped at step 30: RolloutError: a worker died"
