"""What a run's metrics say: one planted fault each, and nothing in healthy runs."""

import math

import numpy as np
import pytest

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.metrics import batch_metrics
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.run.finding_rules import HOLD, LIMITS, RECENT, USUAL, Level, Symptom
from verl_gdpo.run.findings import FindingTracker, Streak, findings

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


@pytest.mark.slow
def test_healthy_runs_have_no_findings():
    for seed in range(20):
        assert findings(run_of(seed=seed)) == []


def only(metrics):
    (found,) = findings(metrics)
    return found


def column(k, values):
    """A change of one reward: `values(rewards, step)` from step 11 on."""

    def change(rewards, step):
        if step > 10:
            rewards[:, k] = values(rewards, step)
        return rewards

    return change


@pytest.mark.parametrize(
    ("value", "found"), [(1.0, []), (0.0, ["constant format"]), (0.5, ["constant format"])]
)
@pytest.mark.parametrize("declared", [True, False])
def test_a_constant_reward(value, found, declared):
    metrics = run_of(column(0, lambda rewards, step: value))
    if not declared:
        for values in metrics.values():
            del values["gdpo/format/at_high"]
    if value == 0.0:  # a fall from .85 to 0 is found as well
        metrics = {step: values for step, values in metrics.items() if step > 10}
    assert [each.topic for each in findings(metrics)] == found
    for each in findings(metrics):
        assert (
            each.what
            == f"format is {value:.3g} and does not differ in any group: it trains nothing"
        )
        assert (each.first, each.last, each.is_over) == (11, STEPS, False)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_reward_without_bounds_that_never_varies(value):
    """A scorer that always returns 0 is found; one that is always content may be right."""
    metrics = run_of(
        lambda rewards, step: np.column_stack([0 * rewards[:, :1] + value, rewards[:, 1:]])
    )
    for values in metrics.values():
        del values["gdpo/format/at_high"]
    assert [found.topic for found in findings(metrics)] == ["constant format"] * (value == 0)


def test_no_numbers_are_an_error():
    """A finding is advice: whatever a run has logged, it must not end the summary."""
    rng = np.random.default_rng(0)
    names = [*run_of()[STEPS], *LIMITS, "critic/score/mean", "critic/advantages/min"]
    numbers = [0.0, -1.0, 1.0, 0.5, 1e-300, 1e300, np.inf, -np.inf, np.nan]
    for _ in range(100):
        before, after = rng.choice(numbers, (2, len(names))).tolist()
        findings(
            {
                step: dict(zip(names, before if step < 30 else after, strict=True))
                for step in range(60)
            }
        )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["actor/lr", "val-aux/x/format/std@2", "critic/advantages/max"])
@pytest.mark.parametrize("step", [1, 30, 60])
def test_a_number_that_is_none_is_found_wherever_and_whenever_it_is(value, name, step):
    metrics = run_of()
    metrics[step] = {**metrics[step], name: value}
    (finding,) = findings(metrics)
    assert (finding.topic, finding.first, finding.last) == ("no number", step, step)
    assert finding.what == f"no finite number: {name}" and finding.is_over == (step < 60)


NORMAL = {
    "actor/grad_norm": 0.3,
    "actor/entropy": 0.3,
    "actor/ppo_kl": 0.001,
    "actor/kl_loss": 0.001,
    "actor/pg_clipfrac": 0.01,
    "critic/advantages/min": -2.0,
    "critic/advantages/max": 2.5,
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
    ("name", "value", "what"),
    [
        ("actor__grad_norm", 22_000.0, "the gradient norm is 2.2e+04; at the start it was 0.3"),
        ("actor__entropy", 1e-4, "the entropy is 0.0001, so all samples of a prompt"),
        (
            "actor__ppo_kl",
            0.4,
            "one update changes the policy by a KL of 0.4; before, it was 0.001",
        ),
        ("actor__kl_loss", 0.4, "the KL to the reference policy is 0.4, after 0.001"),
        ("actor__pg_clipfrac", 0.7, "70% of the tokens are clipped, and train nothing; at the st"),
        ("critic__advantages__min", -900.0, "|A| is up to 900; at the start it was up to 2.5"),
        ("response_length__clip_ratio", 0.8, "80% of the responses are as long as the longest"),
        ("response__aborted_ratio", 0.5, "50% of the responses are empty"),
        ("critic__score__mean", 0.016, "score is 0.016, and was 0.6: almost all of it is lost"),
    ],
)
def test_a_plain_run_that_breaks(name, value, what):
    """Five steps are enough, and four are not."""
    since = 31
    assert findings(plain_run(since, since + HOLD - 2, **{name: value})) == []
    found = only(plain_run(since, since + HOLD - 1, **{name: value}))
    assert found.what.startswith(what) and not found.is_over
    if found.topic.startswith("collapse"):  # it is seen in a mean of five steps
        return
    assert (found.first, found.last) == (since, since + HOLD - 1)
    over = only(plain_run(since, until=since + 8, **{name: value}))
    assert over.is_over and over.steps == f"steps {since} to {since + 7}, and not since"
    assert findings(plain_run(since, until=since + 3, **{name: value})) == []  # a spike


def test_a_level_stays_what_it_was_while_it_is_broken():
    [found] = findings(plain_run(31, steps=300, actor__kl_loss=0.4))
    assert (found.first, found.last, found.is_over) == (31, 300, False)


def test_slow_drift_of_the_kl_is_healthy():
    metrics = plain_run(10**6, steps=500)
    for step, values in metrics.items():
        values["actor/kl_loss"] = 0.001 * step
    assert findings(metrics) == []


def test_a_curriculum_is_no_collapse():
    assert findings(plain_run(31, critic__score__mean=0.25)) == []


def test_a_fall_without_a_known_lowest_reward_is_measured_from_0():
    for low, expected in ((0.2, 0), (0.01, 1)):
        metrics = plain_run(31, critic__score__mean=low)
        for values in metrics.values():
            del values["critic/score/min"]
        assert len(findings(metrics)) == expected


def test_a_collapse_is_measured_from_the_lowest_sample():
    """From 2.5 to -2.9, where a sample has at least -3; from 2.5 to -1 it is none."""
    for low, expected in ((-2.9, 1), (-1.0, 0)):
        metrics = plain_run(31, critic__score__mean=low)
        for values in metrics.values():
            values["critic/score/min"] = -3.0
            values["critic/score/mean"] += 2.5 - 0.6 if values["critic/score/mean"] == 0.6 else 0
        assert len(findings(metrics)) == expected


def test_the_levels_of_a_reward_by_hand():
    level = Level()
    for step in range(USUAL):
        level.add_mean(0.4 + 0.2 * (step % 2))
    assert level.start == pytest.approx(0.5) and level.best == -np.inf
    for _ in range(RECENT):
        level.add_mean(0.1)
    # the differences of the first 20 are all .2: their noise is sqrt(.04 / 2)
    assert (level.best, level.recent) == (pytest.approx(0.5), pytest.approx(0.1))
    assert level.noise == pytest.approx(0.02**0.5)


def test_a_step_costs_the_same_at_the_end():
    """What is read of a step, and what is kept, does not grow."""

    class Counted(dict):
        reads = 0

        def items(self):
            Counted.reads += len(self)
            return super().items()

        def get(self, *given):
            Counted.reads += 1
            return super().get(*given)

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    def size(thing):
        if isinstance(thing, dict):
            return sum(map(size, thing.values()))
        if hasattr(thing, "__dict__"):
            return size(vars(thing))
        return len(thing) if hasattr(thing, "__len__") and not isinstance(thing, str) else 1

    watch, reads, sizes = FindingTracker(), {}, {}
    first = 5 * (USUAL + RECENT)
    for step in range(1, 10 * first):
        before = Counted.reads
        values = NORMAL | {f"gdpo/{r}/{s}": 0.5 for r in "ab" for s in ("mean", "varies")}
        values["gdpo/a/mean"] += 0.1 * (step % 2)
        watch.add(step, Counted(values))
        reads[step], sizes[step] = Counted.reads - before, size(watch.levels)
    assert reads[first] == reads[10 * first - 5] and sizes[first] == sizes[10 * first - 1]
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


def test_what_is_over_comes_last():
    metrics = plain_run(31, steps=90, until=41, actor__grad_norm=1e6)
    for step in range(80, 91):
        metrics[step] = metrics[step] | {"actor/entropy": 1e-5}
    assert [(one.topic, one.is_over) for one in findings(metrics)] == [
        ("entropy", False),
        ("gradient", True),
    ]


def test_a_run_without_any_known_metric_has_no_findings():
    assert findings({}) == findings({1: {"critic/score/mean": 1.0}, 2: {}}) == []
