"""What a run's metrics say: one planted fault each, and nothing in healthy runs."""

import math

import numpy as np
import pytest

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.metrics import batch_metrics
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.tools.run_folder.finding_rules import (
    FEW,
    HOLD,
    LIMITS,
    LONG,
    VALIDATIONS,
    Level,
    Symptom,
    trend,
)
from verl_gdpo.tools.run_folder.findings import FindingTracker, Streak, findings

GROUPS, SAMPLES, STEPS = 32, 8, 60
BOUNDS = {"format": (0.0, 1.0), "correctness": (0.0, 1.0), "brevity": (0.0, 1.0)}


def learning(rng, step, low=0.15, high=0.85):
    """(B, K) rewards of a run that learns: each prompt has its own rate, which rises."""
    rate = low + (high - low) * step / STEPS
    prompts = np.clip(rate + rng.normal(0, 0.15, (GROUPS, 1, 3)), 0.02, 0.98)
    return (rng.random((GROUPS, SAMPLES, 3)) < prompts).astype(float).reshape(-1, 3)


def run_of(change=lambda rewards, step: rewards, seed=0, weights=(1.0, 1.0, 1.0)):
    """The metrics that a run with these rewards logs: {step: {name: value}}."""
    rng = np.random.default_rng(seed)
    settings = GdpoSettings()
    metrics = {}
    for step in range(1, STEPS + 1):
        values = change(learning(rng, step), step)
        matrix = RewardMatrix(
            dict(zip(BOUNDS, weights, strict=True)), values, np.ones_like(values) > 0
        )
        metrics[step] = batch_metrics(
            matrix,
            np.ones(len(values)) > 0,
            np.repeat(np.arange(GROUPS), SAMPLES),
            rng.integers(90, 110, len(values)),
            settings,
            BOUNDS,
        )
        metrics[step] |= {"response_length/mean": 100.0, "critic/advantages/max": 2.5}
    return metrics


def only(metrics):
    (found,) = findings(metrics)
    return found


def test_what_tools_take_is_no_reward():
    """Their seconds fall to almost nothing once the policy calls them no more."""
    metrics = run_of()
    for step, values in metrics.items():
        values["gdpo/rollout/tool_seconds/mean"] = 3.0 if step < 40 else 0.05
        values["gdpo/rollout/generated_tokens/mean"] = 90.0 if step < 40 else 5.0
        # a statistic of a reward, of a data source that has the name of one
        values["gdpo/format/mean/lab/mean"] = 0.9 if step < 40 else 0.0
    assert findings(metrics) == []


def column(k, values):
    """A change of one reward: `values(rewards, step)` from step 11 on."""

    def change(rewards, step):
        if step > 10:
            rewards[:, k] = values(rewards, step)
        return rewards

    return change


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("declared", [True, False])
def test_a_constant_reward(value, declared):
    metrics = run_of(column(0, lambda rewards, step: value))
    if not declared:
        for values in metrics.values():
            del values["gdpo/format/at_high"]
    if value == 0.0:  # a fall from .85 to 0 is found as well
        metrics = {step: values for step, values in metrics.items() if step > 10}
    found = only(metrics)
    end = "is reached, and trains nothing" if value == 1 else "trains nothing"
    text = f"format is {value:.3g} and differs in 0.0% of the groups of 30 steps: it {end}"
    assert (found.topic, found.what) == ("constant format", text)
    assert (found.first, found.last, found.is_over) == (11, STEPS, False)


def test_no_numbers_are_an_error():
    """A finding is advice: whatever a run has logged, it must not end the summary."""
    rng = np.random.default_rng(0)
    names = [*run_of()[STEPS], *LIMITS, "critic/score/mean"]
    names += ["val-aux/x/format/mean@1", "val-core/x/reward/mean@1"]
    numbers = [0.0, -1.0, 1.0, 0.5, 1e-300, 1e300, np.inf, -np.inf, np.nan]
    for _ in range(100):
        drawn = rng.choice(numbers, (2, len(names))).tolist()
        before, after = (dict(zip(names, values, strict=True)) for values in drawn)
        findings({step: before if step < 30 else after for step in range(60)})


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, pytest.param(-math.inf, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["actor/lr", "val-aux/x/format/std@2", "critic/advantages/max"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 30, 60])
def test_a_number_that_is_none_is_found_wherever_and_whenever_it_is(value, name, step):
    metrics = run_of()
    metrics[step] = {**metrics[step], name: value}
    (finding,) = findings(metrics)
    assert (finding.topic, finding.first, finding.last) == ("no number", step, step)
    assert finding.what == f"no finite number: {name}" and finding.is_over == (step < 60)


NORMAL = {
    "actor/grad_norm": 0.3,
    "critic/advantages/min": -1.5,
    "critic/advantages/max": 1.5,
    "actor/entropy": 0.3,
    "actor/ppo_kl": 0.001,
    "actor/kl_loss": 0.001,
    "actor/pg_clipfrac": 0.01,
    "response_length/clip_ratio": 0.1,
    "response/aborted_ratio": 0.0,
    "critic/score/mean": 0.6,
    "critic/score/min": 0.0,
}


def plain_run(since, steps=STEPS, until=10**6, **broken):
    """What verl logs without this package, with some other values from the step `since` on."""
    given = {name.replace("__", "/"): value for name, value in broken.items()}
    return {step: NORMAL | (given if since <= step < until else {}) for step in range(1, steps + 1)}


@pytest.mark.parametrize(
    ("name", "value", "enough", "what"),
    [  # 5 in a row; of a median of 10, it takes 4 or 5 more until it is broken; of a mean of 5, 4
        ("actor__grad_norm", 22_000.0, 5, "the gradient norm is 2.2e+04; at the start it was 0.3"),
        ("actor__entropy", 1e-4, 10, "the entropy is 0.0001, and was 0.3: the samples of a prompt"),
        ("actor__ppo_kl", 0.4, 9, "one update changes the policy by a KL of 0.4; at the start it"),
        ("actor__kl_loss", 3.0, 9, "the KL to the reference policy is 3; at the start it was"),
        ("actor__pg_clipfrac", 0.7, 10, "70% of the tokens are clipped, and train nothing"),
        ("response_length__clip_ratio", 0.8, 10, "80% of the responses are as long as the longest"),
        ("response__aborted_ratio", 0.5, 5, "50% of the responses are empty"),
        ("critic__score__mean", 0.016, 9, "score is 0.016, and was 0.6: almost all of it is lost"),
    ],
)
def test_a_plain_run_that_breaks(name, value, enough, what):
    """So many steps are enough, and one less is not."""
    assert findings(plain_run(31, 29 + enough, **{name: value})) == []
    found = only(plain_run(31, 30 + enough, **{name: value}))
    assert found.what.startswith(what) and not found.is_over
    assert (found.first, found.last) == (31, 30 + enough)  # of the change, not of the rule
    assert only(plain_run(31, 90, until=51, **{name: value})).is_over
    assert findings(plain_run(31, until=34, **{name: value})) == []  # a spike
    if enough == HOLD:
        over = only(plain_run(31, until=39, **{name: value}))
        assert over.steps == "steps 31 to 38, over since then"


UNTRAINED = {
    "gradient": {"actor/grad_norm": 0.0},
    "advantages": {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0},
}


@pytest.mark.parametrize("what", UNTRAINED)
def test_a_run_that_cannot_learn(what):
    """Ten steps are enough, and nine are not; also from the first step, which is no change."""
    values = {name.replace("/", "__"): value for name, value in UNTRAINED[what].items()}
    assert findings(plain_run(31, 39, **values)) == []
    found = only(plain_run(31, 40, **values))
    assert (found.topic, found.first, found.last) == ("untrained", 31, 40)
    assert what in found.what and "is learned" in found.what
    assert only(plain_run(1, 10, **values)).first == 1
    assert only(plain_run(31, 90, until=61, **values)).is_over
    # a validation is another call, and ends no streak
    tracker = FindingTracker()
    for step, metrics in plain_run(31, 40, **values).items():
        tracker.add(step, metrics)
        tracker.add(step, {TEST: 0.5})
    assert [one.topic for one in tracker.findings()] == ["untrained"]
    # one advantage that is not 0 trains something
    assert findings(plain_run(31, critic__advantages__max=0.0)) == []


def ramp(before, after, first, last):
    """From one value at the step `first` to another at `last`, along a line."""

    def value(step):
        part = min(max((step - first) / (last - first), 0.0), 1.0)
        return before + (after - before) * part

    return value


def later(before, after):
    return lambda step: before if step <= 40 else after


def noisy(mean):
    """At every fifth step alone."""
    return lambda step: 0.0 if step % 5 else 5 * mean


REWARD = {"mean": 0.6, "min": 0.0, "max": 1.0, "varies": 0.5, "share": 0.5}


def named_run(changes):
    """120 steps of a run with two rewards, with other values as functions of the step."""
    usual = {f"gdpo/{r}/{what}": value for r in "ab" for what, value in REWARD.items()}
    return {
        step: NORMAL | usual | {name: of_step(step) for name, of_step in changes.items()}
        for step in range(1, 121)
    }


MEAN, SHARE, MISSING = (f"gdpo/a/{what}" for what in ("mean", "share", "missing"))
TEST, LOW = "val-aux/x/a/mean@1", later(0.02, 0.02)


def hacked(tokens, mean):
    return {"response_length/mean": later(100, tokens), MEAN: later(0.6, mean)}


def validated(change, noise=0.0, trained=0.5):
    """Changes over the 120 steps, with a validation at each: a trend is that of 24 of them."""
    test = lambda step: 0.8 + change * step / 120 + noise * (step % 2)  # noqa: E731
    return {MEAN: lambda step: 0.3 + trained * step / 120, TEST: test}


OTHER = "gdpo/b/mean"


@pytest.mark.parametrize("steps", [1, 30, 80])
@pytest.mark.parametrize("tokens", [100.0, 90.0])
def test_a_reward_that_falls_while_another_rises(steps, tokens):
    """Whatever the length does, at once or slowly; the steps are those of the fall."""
    changes = {
        MEAN: ramp(0.6, 0.4, 30, 30 + steps),
        OTHER: ramp(0.3, 0.5, 30, 30 + steps),
        "response_length/mean": later(100.0, tokens),
    }
    found = only(named_run(changes))
    assert found.topic == "traded a" and not found.is_over
    assert found.what.startswith("a fell from 0.6") and "while b rose from 0.3" in found.what
    assert 31 <= found.first <= 31 + steps / 4 and found.last == 120


@pytest.mark.parametrize(
    "changes",
    [
        {MEAN: ramp(0.6, 0.4, 30, 60)},  # the other one stays
        {MEAN: ramp(0.6, 0.4, 30, 60), OTHER: ramp(0.5, 0.3, 30, 60)},  # harder prompts
        {MEAN: ramp(0.6, 0.45, 30, 60), OTHER: ramp(0.3, 0.6, 30, 60)},
        {MEAN: ramp(0.6, 0.4, 30, 60), OTHER: ramp(0.3, 0.37, 30, 60)},
        {MEAN: ramp(0.6, 0.3, 30, 31), OTHER: ramp(0.3, 0.9, 50, 110)},  # not meanwhile
        # what the other one gains, it has had before
        {MEAN: ramp(0.6, 0.4, 60, 90), OTHER: lambda step: 0.5 if step < 30 or step > 75 else 0.3},
    ],
)
def test_a_fall_that_no_other_reward_gains_from(changes):
    assert findings(named_run(changes)) == []


@pytest.mark.parametrize(("count", "is_told"), [(FEW, True), (FEW + 1, False)])
def test_of_many_rewards_one_rises_by_chance(count, is_told):
    changes = {MEAN: ramp(0.6, 0.4, 30, 60), OTHER: ramp(0.3, 0.5, 30, 60)}
    metrics = named_run(changes)
    for values in metrics.values():
        for number in range(count - 2):
            for what, value in REWARD.items():
                values[f"gdpo/more{number}/{what}"] = value
    assert [one.topic for one in findings(metrics)] == ["traded a"] * is_told


def test_a_trade_is_over_when_the_reward_is_back():
    back = {MEAN: lambda step: 0.4 if 40 < step <= 80 else 0.6, OTHER: later(0.3, 0.5)}
    found = only(named_run(back))
    assert (found.topic, found.first, found.last, found.is_over) == ("traded a", 41, 80, True)


@pytest.mark.parametrize(("gone", "count"), [(0.33, 20), (0.25, 18)])
def test_a_large_fall_in_few_validations(gone, count):
    """.62 until the tenth validation, and then down along a line, while training rises."""
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.02, 200).tolist()

    def run(trained):
        metrics = {}
        for step in range(1, 5 * count + 1):
            values = dict(NORMAL)
            for what, value in REWARD.items():
                values[f"gdpo/a/{what}"] = value
            values[MEAN] = 0.3 + trained * step / 100
            if step % 5 == 0:
                values[TEST] = 0.62 - gone * max(0, step / 5 - 10) / (count - 10) + noise[step]
            metrics[step] = values
        return metrics

    found = only(run(trained=0.5))
    assert found.topic == "validation a" and 40 <= found.first <= 60
    assert findings(run(trained=0.0)) == []


@pytest.mark.parametrize(
    ("topic", "sick", "healthy"),
    [
        ("entropy", {"actor/entropy": later(0.3, 0.034)}, {"actor/entropy": later(0.3, 0.035)}),
        ("update", {"actor/ppo_kl": later(0.001, 0.11)}, {"actor/ppo_kl": later(0.02, 0.19)}),
        ("reference", {"actor/kl_loss": later(0.001, 1.3)}, {"actor/kl_loss": later(0.001, 1.1)}),
        ("length a", hacked(39, 0.4), hacked(41, 0.4)),
        ("length a", hacked(246, 0.4), hacked(244, 0.4)),
        ("length a", hacked(39, 0.44), hacked(39, 0.46)),
        ("constant a", {"gdpo/a/varies": later(0.5, 0.04)}, {"gdpo/a/varies": later(0.5, 0.06)}),
        # the standard error of so much noise is .014
        ("constant a", {"gdpo/a/varies": noisy(0.02)}, {"gdpo/a/varies": noisy(0.03)}),
        ("ignored a", {SHARE: LOW}, {SHARE: LOW, MISSING: later(0.5, 0.5)}),
        ("ignored a", {SHARE: later(-0.2, 0.02)}, {SHARE: later(0.5, 0.02)}),
        ("validation a", validated(-0.4), validated(-0.38)),
        ("validation a", validated(-0.5, noise=0.05), validated(-0.5, noise=0.3)),
        ("validation a", validated(-0.5), validated(-0.5, trained=0.2)),
    ],
)
def test_both_sides_of_a_limit(topic, sick, healthy):
    found = only(named_run(sick))
    assert (found.topic, found.is_over) == (topic, False)
    assert findings(named_run(healthy)) == []


@pytest.mark.parametrize("count", [7, VALIDATIONS])
def test_the_trend_of_numpy(count):
    rng = np.random.default_rng(0)
    level = Level()
    values = rng.normal(0.5, 0.1, VALIDATIONS)
    for step, value in enumerate(values):
        level.add(step, value)
    (slope, _), covariance = np.polyfit(range(count), values[-count:], 1, cov=True)
    error = covariance[0, 0] ** 0.5
    assert trend(level, count) == pytest.approx((slope * (count - 1), error * (count - 1)))


def test_a_level_stays_what_it_was_while_it_is_broken():
    [found] = findings(plain_run(31, steps=300, actor__kl_loss=3.0))
    assert (found.first, found.last, found.is_over) == (31, 300, False)


def test_a_collapse_is_measured_from_the_lowest_sample():
    """From 2.5 to -2.9, where a sample has at least -3; from 2.5 to -1 it is none."""
    for low, expected in ((-2.9, 1), (-1.0, 0)):
        metrics = plain_run(31, critic__score__mean=low)
        for values in metrics.values():
            values["critic/score/min"] = -3.0
            values["critic/score/mean"] += 2.5 - 0.6 if values["critic/score/mean"] == 0.6 else 0
        assert len(findings(metrics)) == expected


def test_a_step_costs_the_same_at_the_end():
    """What is kept, and gone through at a step, does not grow."""

    def size(thing):
        if isinstance(thing, dict):
            return sum(map(size, thing.values()))
        if hasattr(thing, "__dict__"):
            return size(vars(thing))
        return len(thing) if hasattr(thing, "__len__") and not isinstance(thing, str) else 1

    watch, sizes = FindingTracker(), {}
    for step in range(1, 50 * LONG):
        values = NORMAL | {f"gdpo/{r}/{s}": 0.5 for r in "ab" for s in ("mean", "varies", "share")}
        watch.add(step, values | {"gdpo/a/mean": 0.5 + 0.1 * (step % 2), TEST: 0.5})
        sizes[step] = size(watch.levels)
    # after as many steps of a block of ten
    assert sizes[5 * LONG - 1] == sizes[50 * LONG - 1]
    assert watch.findings() == []


def symptom(holds):
    return Symptom("topic", holds, "", "", HOLD)


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        ("....", None),
        ("####", None),  # too short
        (".#####.", (1, 5)),
        ("#####....#", (0, 9)),  # one stretch: it failed for 4 steps alone
        ("#####.....#", (0, 4)),  # over, and not yet begun again
        ("#####.....#####", (10, 14)),  # the latest one
        (".#.#.#.#.#", None),
    ],
)
def test_hysteresis(holds, expected):
    streak = Streak(HOLD)
    for step, sign in enumerate(holds):
        streak.add(step, symptom(sign == "#"))
    assert (HOLD, streak.steps) == (5, expected)


def test_a_run_without_any_known_metric_has_no_findings():
    assert findings({}) == findings({1: {"critic/score/mean": 1.0}, 2: {}}) == []
