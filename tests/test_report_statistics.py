"""What a report says of seeds: which runs are pooled, and which differences it claims."""

from pathlib import Path

import numpy as np
import pytest
from made_run import make_run
from omegaconf import OmegaConf

from verl_gdpo.run.ends import ends
from verl_gdpo.tools.plots import THEMES, figure_of
from verl_gdpo.tools.report.charts import reward_panels
from verl_gdpo.tools.report.intervals import differences_of_arms, table_of_differences
from verl_gdpo.tools.report.runs import Run, RunsOfArm, read_arms


def test_runs_that_differ_in_more_than_seeds_are_not_pooled(tmp_path):
    a, b, c = (make_run(tmp_path / name, steps=4, seed=i) for i, name in enumerate("abc"))
    [arm] = read_arms([a, b, c])
    assert (arm.name, len(arm.runs)) == ("gdpo", 3)
    file = c / "hydra" / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace("train_batch_size: 4", "train_batch_size: 8"))
    arms = read_arms([a, b, c])
    assert {arm.name: len(arm.runs) for arm in arms} == {
        "gdpo 1 (data.train_batch_size=4)": 2,
        "gdpo 2 (data.train_batch_size=8)": 1,
    }


def test_lines_of_one_arm_have_one_entry_in_the_legend():
    arm = RunsOfArm("gdpo", [Run(Path(str(i)), curve(i)) for i in (1.0, 2.0)])
    [panel] = reward_panels([arm]).values()
    [axes] = figure_of([panel], THEMES["light"]).axes
    assert len(panel.lines) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["gdpo"]


def curve(*values, key="gdpo/format/mean"):
    return {step: {key: value} for step, value in enumerate(values, start=1)}


def test_the_ends_are_what_they_say():
    key = "val-aux/made/format/mean@1"
    metrics = {0: {key: 0.1}, **curve(0.5, 0.6, 0.7)}
    metrics[4] = {"gdpo/correctness/mean": 2.0, key: 0.9}
    assert {name: str(end) for name, end in ends(metrics, "format").items()} == {
        "first step": "0.500",
        "last step": "0.700 (step 3)",  # the run went on to step 4 without this reward
        "validation before": "0.100",
        "after": "0.900",
    }
    assert {name: str(end) for name, end in ends(metrics, "correctness").items()} == {
        "first step": "2.000 (step 4)",
        "last step": "2.000",
    }
    del metrics[0]
    assert "validation before" not in ends(metrics, "format")
    assert "after" not in ends({0: {key: 0.1}}, "format")


def made_arm(name, values_of_runs, **settings):
    """A run for each tuple, which are its rewards at all of ten steps."""
    runs = []
    for seed, values in enumerate(values_of_runs):
        found = {f"gdpo/{reward}/mean": value for reward, value in zip("xy", values, strict=False)}
        config = OmegaConf.create({"arm": name, "data": {"seed": seed, **settings}})
        runs.append(Run(Path(f"{name}{seed}"), dict.fromkeys(range(1, 11), found), config))
    return RunsOfArm(name, runs)


def test_an_interval_by_hand():
    # 2 1 3 less 1 1 1: mean 1, std 1, error 1/sqrt 3; t of 2 degrees of freedom at .975 is 4.303
    arms = [made_arm("grpo", [(1,), (1,), (1,)]), made_arm("gdpo", [(2,), (1,), (3,)])]
    [found] = differences_of_arms(arms)
    assert (found.arm, found.other, found.is_paired) == ("gdpo", "grpo", True)
    assert (found.value, found.high) == (1, pytest.approx(1 + 4.303 / 3**0.5, abs=1e-3))
    assert not found.is_claimed
    # other rows: Welch, whose variance and freedom here are of gdpo alone
    [found] = differences_of_arms([arms[1], made_arm("grpo", [(1,)] * 3, train_files="other")])
    assert (found.is_paired, found.high) == (False, pytest.approx(1 + 4.303 / 3**0.5, abs=1e-3))
    # a second comparison makes each interval wider: t at .9875 is 6.205
    arms = [made_arm("grpo", [(1, 0)] * 3), made_arm("gdpo", [(2, 0), (1, 0), (3, 0)])]
    x, y = differences_of_arms(arms)
    assert x.high == pytest.approx(1 + 6.205 / 3**0.5, abs=1e-3)
    assert (y.low, y.high, y.is_claimed) == (0, 0, False)
    assert table_of_differences(arms).rows[0][:2] == ("x", "gdpo less grpo")


def test_runs_are_paired_by_their_seeds_and_not_by_their_order():
    gdpo, grpo = made_arm("gdpo", [(1,), (5,), (9,)]), made_arm("grpo", [(0,), (4,), (8.5,)])
    [found] = differences_of_arms([gdpo, RunsOfArm("grpo", grpo.runs[::-1])])
    assert found.is_paired and found.is_claimed  # 1, 1 and .5; unpaired, the spread is 4


def test_one_run_has_no_interval():
    arms = [made_arm("gdpo", [(1,)]), made_arm("grpo", [(1,), (2,)])]
    assert differences_of_arms(arms) == [] and table_of_differences(arms) is None


def simulated_claims(rewards, shift):
    """Of 100 reports of five seeds an arm, how many claim some difference.

    Half of the variance between runs is their seed's, which both arms share; `shift` counts in
    standard deviations between runs.
    """
    rng = np.random.default_rng(16)
    claims = 0
    for _ in range(100):
        seeds, gdpo, grpo = rng.normal(scale=0.5**0.5, size=(3, 5, rewards))
        arms = [made_arm("gdpo", seeds + gdpo + shift), made_arm("grpo", seeds + grpo)]
        claims += any(one.is_claimed for one in differences_of_arms(arms))
    return claims


@pytest.mark.parametrize("rewards", [1, 2])
def test_identical_arms_are_seldom_told_apart(rewards):
    assert simulated_claims(rewards, 0.0) <= 10


def test_a_difference_of_two_standard_deviations_is_found():
    assert simulated_claims(1, 2.0) >= 80
