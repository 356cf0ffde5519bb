"""What a report says of seeds: which runs are pooled, and which differences it claims."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from made_arms import made_arm
from omegaconf import OmegaConf
from run_folder_writer import make_run
from scipy import stats

from verl_gdpo.tools.report.intervals import CONFIDENCE, differences_of_arms, risk_of_each
from verl_gdpo.tools.report.runs import RunsOfArm, ends_apart, read_arms, without_stopped
from verl_gdpo.tools.report.tables import results, table_of_differences


def test_runs_that_differ_in_more_than_seeds_are_not_pooled(tmp_path):
    a, b, c = (make_run(tmp_path / name, steps=4, seed=i) for i, name in enumerate("abc"))
    [arm] = read_arms([a, b, c])
    assert (arm.name, len(arm.runs)) == ("gdpo", 3)
    file = c / "hydra" / ".hydra" / "config.yaml"
    file.write_text(file.read_text().replace("train_batch_size: 4", "train_batch_size: 8"))
    arms = read_arms([a, b, c])
    assert {arm.name: len(arm.runs) for arm in arms} == {"gdpo 1": 2, "gdpo 2": 1}


def curve(*values, key="gdpo/format/mean"):
    return {step: {key: value} for step, value in enumerate(values, start=1)}


def arm_of(name, values_of_runs, **settings):
    """A run for each tuple, which are its rewards at all of ten steps."""
    named = (zip("xyzuvw", values, strict=False) for values in values_of_runs)
    rewards = [{f"gdpo/{reward}/mean": value for reward, value in pairs} for pairs in named]
    configs = [configured(name, seed, **settings) for seed in range(len(rewards))]
    return made_arm(name, *(dict.fromkeys(range(1, 11), r) for r in rewards), configs=configs)


@functools.cache
def configured(name, seed, **settings):
    return OmegaConf.create({"arm": name, "data": {"seed": seed, **settings}})


@pytest.mark.parametrize("size", [1e80, 1e160, 1e307])
def test_rewards_as_large_as_floats_can_be(size):
    """Their squares and sums are more than a float holds, also where runs are no pairs."""
    few = [arm_of("grpo", [(1.0,)] * 3), arm_of("gdpo", [(2.0,), (1.0,), (3.0,)])]
    for arms in (few, [few[1], arm_of("grpo", [(1.0,)] * 3, train_files="other")]):
        [expected] = differences_of_arms(arms)
        large = []
        for arm in arms:
            values = [(run.trained["x"][1] * size,) for run in arm.runs]
            files = arm.runs[0].config.data.get("train_files")
            large.append(arm_of(arm.name, values, **({"train_files": files} if files else {})))
        [found] = differences_of_arms(large)
        assert found.value == pytest.approx(expected.value * size)
        assert found.high == pytest.approx(expected.high * size)


def t_of_2(risk):
    """Student's t of 2 degrees of freedom that is exceeded on either side with `risk`."""
    return (1 - risk) * (2 / (risk * (2 - risk))) ** 0.5


def test_an_interval_by_hand():
    # 2 1 3 less 1 1 1: mean 1, std 1, error 1/sqrt 3
    arms = [arm_of("grpo", [(1,), (1,), (1,)]), arm_of("gdpo", [(2,), (1,), (3,)])]
    [found] = differences_of_arms(arms)
    assert (found.arm, found.other, found.is_paired) == ("gdpo", "grpo", True)
    risk = 1 - CONFIDENCE
    assert found.value == 1
    assert found.high == pytest.approx(1 + t_of_2(risk) / 3**0.5) == pytest.approx(3.0659, abs=1e-4)
    assert not found.is_claimed
    # a reward of another size says as much
    small = [arm_of("grpo", [(1e-6,)] * 3), arm_of("gdpo", [(2e-6,), (1e-6,), (3e-6,)])]
    row = table_of_differences(small).rows[0]
    assert row[2:4] == ("+0.000001", "-0.000001066 to +0.000003066")
    # other rows: Welch, whose variance and freedom here are of gdpo alone
    [found] = differences_of_arms([arms[1], arm_of("grpo", [(1,)] * 3, train_files="other")])
    assert (found.is_paired, found.high) == (False, pytest.approx(1 + t_of_2(risk) / 3**0.5))
    # a second comparison makes each interval wider: below five runs the risk is split evenly
    arms = [arm_of("grpo", [(1, 0)] * 3), arm_of("gdpo", [(2, 0), (1, 0), (3, 0)])]
    x, y = differences_of_arms(arms)
    assert x.high == pytest.approx(1 + t_of_2(risk / 2) / 3**0.5)
    assert (y.low, y.high, y.is_claimed) == (0, 0, False)
    assert table_of_differences(arms).rows[0][:2] == ("x", "gdpo less grpo")


def test_the_room_of_a_comparison_follows_from_the_correlations():
    together = np.array([[1.0, 3.0], [-1.0, -3.0], [0.0, 0.0]])
    assert risk_of_each(together, 0.1) == pytest.approx(0.1, rel=0.05)
    # two that are at right angles in the plane never both err: their risks add up
    apart = np.array([[1.0, 1.0], [-1.0, 1.0]])
    assert risk_of_each(apart, 0.1) == pytest.approx(0.05, rel=0.05)
    # the angle between them is pi / 8: of a direction at the angle a, both miss with 1 - a / pi
    # while they are pi / 8 apart, so that 2 a / pi + 1 / 8 = .6 for the risk, and each has 2 a / pi
    angle = np.pi / 8
    near = np.array([[1.0, np.cos(angle)], [0.0, np.sin(angle)]])
    assert risk_of_each(near, 0.6) == pytest.approx(0.475, rel=0.02)
    # a reward that is the same in all runs takes no part
    assert risk_of_each(np.array([[1.0, 0.0], [-1.0, 0.0]]), 0.1) == pytest.approx(0.1, rel=0.05)


def test_arms_without_common_rows_share_the_risk():
    """Each comparison has its part of the risk, and within an arm the joint one of its rewards."""
    runs = [(1, 10), (2, 20), (3, 30), (4, 40), (5, 50)]  # y is 10 x, and errs with it
    arms = [
        arm_of("gdpo", runs),
        arm_of("grpo", runs),
        arm_of("other", runs, train_files="o"),
    ]
    found = differences_of_arms(arms)
    assert [(one.reward, one.other, one.is_paired) for one in found] == [
        *(("x", "grpo", True), ("y", "grpo", True)),
        *(("x", "other", False), ("y", "other", False)),
    ]
    # two independent samples of variance 2.5: error 1, Welch's freedom 8, half of the risk
    assert found[2].high == pytest.approx(stats.t.isf((1 - CONFIDENCE) / 4, 8), rel=0.01)
    assert found[3].high == pytest.approx(10 * found[2].high)


def test_runs_are_paired_by_their_seeds_and_not_by_their_order():
    gdpo, grpo = arm_of("gdpo", [(1,), (5,), (9,)]), arm_of("grpo", [(0,), (4,), (8.5,)])
    [found] = differences_of_arms([gdpo, RunsOfArm("grpo", grpo.runs[::-1])])
    assert found.is_paired and found.is_claimed  # 1, 1 and .5; unpaired, the spread is 4


def test_one_run_has_no_interval():
    arms = [arm_of("gdpo", [(1,)]), arm_of("grpo", [(1,), (2,)])]
    assert differences_of_arms(arms) == [] and table_of_differences(arms) is None


REPORTS = 400


def simulated_claims(rewards, shift=0.0, correlation=0.0, is_paired=True):
    """The shares of reports, of five seeds an arm, that claim the first reward, and any reward.

    Half of the variance between runs is their seed's, which paired arms share; `shift`, of the
    first reward, counts in standard deviations between runs.
    """
    rng = np.random.default_rng(16)
    mixed = np.linalg.cholesky(
        np.full((rewards, rewards), correlation) + (1 - correlation) * np.eye(rewards)
    )
    rows = {} if is_paired else {"train_files": "others"}
    claims = []
    for _ in range(REPORTS):
        seeds, others, gdpo, grpo = rng.normal(scale=0.5**0.5, size=(4, 5, rewards)) @ mixed.T
        gdpo[:, 0] += shift
        other = arm_of("grpo", (seeds if is_paired else others) + grpo, **rows)
        found = differences_of_arms([arm_of("gdpo", seeds + gdpo), other])
        assert found[0].is_paired == is_paired
        claims.append((found[0].is_claimed, any(one.is_claimed for one in found)))
    return np.mean(claims, axis=0)


def slow(*cases):
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


PAIRED = slow((2, 0.0, True), (2, 0.5, True), (2, 0.9, True), (6, 0.0, True))
CASES = [(1, 0.0, True), (1, 0.0, False), *PAIRED, *slow((2, 0.5, False))]


@pytest.mark.parametrize(("rewards", "correlation", "is_paired"), CASES)
def test_identical_arms_are_seldom_told_apart(rewards, correlation, is_paired):
    assert simulated_claims(rewards, 0.0, correlation, is_paired)[1] <= 0.10


@pytest.mark.parametrize(
    ("rewards", "correlation", "fewest"),
    [(1, 0.0, 0.90), (2, 0.9, 0.86), *slow((2, 0.0, 0.82), (3, 0.9, 0.82))],
)
def test_a_difference_of_two_standard_deviations_is_found(rewards, correlation, fewest):
    assert simulated_claims(rewards, 2.0, correlation)[0] >= fewest


def test_a_run_that_crashed_hides_no_difference():
    """A true .2, which is there at the end alone; one of five seeds stopped at a fifth."""
    noise = np.random.default_rng(3).normal(scale=0.05, size=(2, 5, 60)).tolist()

    def arm(name, gain, lasts):
        runs = [
            {step: {"gdpo/x/mean": gain * step / 60 + of[step - 1]} for step in range(1, last + 1)}
            for of, last in zip(noise[gain > 0], lasts, strict=True)
        ]
        return made_arm(name, *runs, configs=[configured(name, seed) for seed in range(5)])

    arms = [arm("gdpo", 0.2, [60, 60, 12, 60, 60]), arm("grpo", 0.0, [60] * 5)]
    assert abs(differences_of_arms(arms)[0].value) < 0.1
    compared, remarks = without_stopped(arms)
    [found] = differences_of_arms(compared)
    assert found.is_claimed and found.value == pytest.approx(0.2, abs=0.05)
    assert [len(arm.runs) for arm in compared] == [4, 5]
    assert remarks["gdpo2"].startswith("gdpo2 got to step 12, and most runs of gdpo to 60: the tab")
    [pair], remarks = without_stopped([replace(arms[0], runs=arms[0].runs[1:3])])
    assert len(pair.runs) == 2 and remarks["gdpo2"].endswith("the tables compare the arms there")


def test_an_arm_without_validation_is_compared_in_training():
    def arm(name, has_validation, value):
        curve = {step: {"gdpo/x/mean": value} for step in range(1, 11)}
        if has_validation:
            curve[10]["val-aux/made/x/mean@1"] = 7.0
        return made_arm(name, curve, curve, configs=[configured(name, seed) for seed in (1, 2)])

    arms = [arm("gdpo", True, 2.0), arm("grpo", False, 1.5), arm("grpo_no_std", True, 1.0)]
    assert {one.other: one.value for one in differences_of_arms(arms)} == {
        "grpo": 0.5,
        "grpo_no_std": 0.0,
    }


def test_arms_of_unequal_length_are_compared_where_both_are():
    """Both learn alike; one stopped at step 22 of 60, and validates at other steps."""

    def arm(name, steps, every):
        curve = {step: {"gdpo/x/mean": step / 100} for step in range(1, steps + 1)}
        for step in range(every, steps + 1, every):
            curve[step]["val-aux/made/y/mean@1"] = step / 100
        return made_arm(name, curve, curve, configs=[configured(name, seed) for seed in (1, 2)])

    arms = [arm("gdpo", 22, 6), arm("grpo", 60, 4)]
    assert {one.reward: one.value for one in differences_of_arms(arms)} == {"x": 0, "y": 0}
    said = " up to step 22, the last one that all runs have"
    assert table_of_differences(arms).caption.endswith(said)
    assert results(arms).caption.startswith(f"Mean reward{said};")
    ends_of_x = [row[-3] for row in results(arms).rows if row[0] == "x"]
    assert ends_of_x == ["0.2, 0.2", "0.2, 0.2"]
    assert ends_apart(arms[:1]) == ""
