"""The first line of the page, and the remarks on the runs."""

import pytest
from made_arms import made_arm
from run_folder_writer import make_run

from verl_gdpo.tools.report.charts import sections
from verl_gdpo.tools.report.page import all_remarks, headline
from verl_gdpo.tools.report.runs import read_arms
from verl_gdpo.tools.run.starts import StartManifest, ended, write


def line_of(*arms):
    runs = [run for arm in arms for run in arm.runs]
    return headline(all_remarks(runs, sections(arms)[0].charts), runs)


def arm(name="gdpo", steps=60, **values):
    """`values` are numbers, or functions of the step."""
    values = {"gdpo/a/mean": 0.5, **values}
    at = lambda step: {k: v(step) if callable(v) else v for k, v in values.items()}  # noqa: E731
    return made_arm(name, {step: at(step) for step in range(1, steps + 1)})


def after(step, value, usual):
    return lambda now: value if now > step else usual


def test_what_was_looked_for_in_vain():
    assert line_of(arm(), arm("grpo")) == "No problem found in 2 runs of 60 steps"
    assert line_of(arm(steps=19)) == "No problem found in 19 steps; most rules need 30"
    plain = made_arm("mine", {step: {"critic/score/mean": 0.5} for step in range(1, 31)})
    assert line_of(plain) == (
        "No problem found in 30 steps. The rewards of mine0 were not looked at one by one: that "
        "needs reward.reward_manager.name=gdpo"
    )


def test_what_is_over_comes_last_and_all_are_counted():
    values = {
        "actor/grad_norm": lambda step: 22_000.0 if 20 < step < 30 else 0.3,
        "actor/entropy": after(45, 1e-6, 0.5),
    }
    arms = arm(**values), arm("grpo")
    assert line_of(*arms) == "2 problems found in 2 runs of 60 steps, of which 1 is over"
    charts = sections(arms)[0].charts
    entropy, gradient = all_remarks([run for arm in arms for run in arm.runs], charts)
    assert (entropy.first, entropy.last, gradient.first, gradient.is_over) == (46, 60, 21, True)
    assert entropy.chart == next(chart.id for chart in charts if chart.title == "Entropy")


@pytest.mark.parametrize("code", [0, None, 1, 124])
def test_a_training_that_stopped_is_said_before_its_metrics(tmp_path, code):
    run = make_run(tmp_path / "run", steps=30)
    write(run, StartManifest("2026-01-02T03:04:05+00:00", {}, {}), "algorithm: {}\n")
    if code is not None:
        ended(run, "RolloutError: a worker died" if code else "", code)
    [arm] = read_arms([run])
    said = [remark.text for remark in all_remarks(arm.runs, sections([arm])[0].charts)]
    if code:
        assert said == ["the training stopped at step 30: RolloutError: a worker died"]
        assert line_of(arm) == "1 problem found in 30 steps"
    else:
        assert said == []
        assert line_of(arm) == "No problem found in 30 steps"
