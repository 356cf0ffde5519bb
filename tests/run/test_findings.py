"""What a run's metrics say: one planted fault each, and nothing in healthy runs."""

import numpy as np
import pytest

from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import batch_metrics
from verl_gdpo.run import findings as module
from verl_gdpo.run.findings import HOLD, READ, stretch
from verl_gdpo.settings.algorithm import GdpoSettings

GROUPS, SAMPLES, STEPS = 32, 8, 40
BOUNDS = {"format": (0.0, 1.0), "correctness": (0.0, 1.0), "brevity": (0.0, 1.0)}


def findings(metrics):
    """Every test here also sees that the rules read only what the training log remembers."""
    remembered = {
        step: {name: value for name, value in values.items() if READ.fullmatch(name)}
        for step, values in metrics.items()
    }
    found = module.findings(metrics)
    assert module.findings(remembered) == found
    return found


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
    ("value", "text", "advice"),
    [
        (1.0, "is reached by 100% of the samples", "Nothing has to be done"),
        (0.0, "is at its lowest value in 100% of the samples", "use easier prompts"),
        (0.5, "trains nothing", "Look at its scorer"),
    ],
)
def test_a_constant_reward(value, text, advice):
    found = only(run_of(column(0, lambda rewards, step: value)))
    assert found.what.startswith("format (mean ") and text in found.what
    assert advice in found.advice
    assert (found.first, found.last) == (11, STEPS)


def test_a_reward_that_never_reaches_the_advantage():
    found = only(run_of(weights=(1.0, 1.0, 0.0)))
    assert "brevity differs in" in found.what and "rewards.brevity" in found.advice
    assert (found.first, found.last) == (1, STEPS)


def test_most_groups_silent_and_what_batch_norm_makes_of_it():
    def change(rewards, step):
        if step > 20:
            rewards[:] = 1.0
            rewards[:SAMPLES, 0] = np.arange(SAMPLES) % 2  # one group of 32 is left
        return rewards

    metrics = run_of(change)
    for step in range(21, STEPS + 1):
        metrics[step]["critic/advantages/min"] = -5.5
    *_, silent, blown_up = findings(metrics)
    assert silent.what == "97% of the groups have no signal: their rollouts train nothing"
    assert blown_up.what.startswith("batch norm multiplies the few groups with signal by ")
    assert blown_up.what.endswith("times as much as at the start; |A| is up to 5.5")
    assert (silent.first, silent.last) == (blown_up.first, blown_up.last) == (21, STEPS)


def test_batch_norm_makes_nothing_of_no_signal():
    """At last every group is silent: their advantages are 0, however small the spread is."""

    def change(rewards, step):
        if step > 20:
            rewards[:] = 1.0
        return rewards

    metrics = run_of(change)
    assert metrics[STEPS]["gdpo/batch_norm_std"] == 0
    assert "silent groups" in {found.topic for found in findings(metrics)}
    assert "blown up" not in {found.topic for found in findings(metrics)}


def test_no_numbers_are_an_error():
    """A finding is advice: whatever a run has logged, it must not end the summary."""
    rng = np.random.default_rng(0)
    names = [name for name in run_of()[STEPS] if READ.fullmatch(name)]
    names += [f"val-aux/made/{reward}/mean@1" for reward in BOUNDS]
    numbers = [0.0, -1.0, 1.0, 0.5, 1e-300, 1e300, np.inf, -np.inf, np.nan]
    for _ in range(200):
        before, after = rng.choice(numbers, (2, len(names))).tolist()
        findings(
            {
                step: dict(zip(names, before if step < 10 else after, strict=True))
                for step in range(20)
            }
        )


def without_right_answers(share):
    """From step 11 on, no answer to this share of the prompts is right, and format varies."""

    def change(rewards, step):
        if step > 10:
            rewards[: int(share * GROUPS) * SAMPLES, 1] = 0.0
        return rewards

    return change


def test_groups_without_a_right_answer_drive_the_update():
    found = only(run_of(without_right_answers(0.8)))
    assert "of the update come from groups in which no sample has more than the low" in found.what
    assert "filter_groups.enable=True with metric=correctness" in found.advice
    assert (found.first, found.last) == (11, STEPS)


def test_some_groups_without_a_right_answer_are_healthy():
    assert findings(run_of(without_right_answers(0.4))) == []


def test_rewards_in_conflict():
    found = findings(run_of(column(1, lambda rewards, step: 1 - rewards[:, 0]), weights=(2, 1, 1)))
    assert found[0].what == "format and correctness oppose each other: correlation -1.00"
    assert found[1].what.startswith("training lowers correctness")


def test_a_length_that_drifts():
    for sign, word in ((1, "longer"), (-1, "shorter")):
        metrics = run_of()
        for step, values in metrics.items():
            values["gdpo/length_correlation"] = 0.5 * sign if step > 10 else 0.0
            values["response_length/mean"] = 100.0 * 1.02 ** (sign * step)
        found = only(metrics)
        assert found.what.startswith(f"responses get {word}, because the advantage follows")
        assert (found.first, found.last) == (11, STEPS)


def test_a_length_that_is_only_correlated_does_not_drift():
    metrics = run_of()
    for values in metrics.values():
        values["gdpo/length_correlation"] = 0.5
    assert findings(metrics) == []


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ((0.1, 0.6, 0.55, 0.5, 0.4), True),
        ((0.1, 0.6, 0.3), False),  # one validation is not a trend
        ((0.6, 0.5, 0.4, 0.4, 0.4), False),  # it has never risen
        ((0.1, 0.6, 0.59, 0.58, 0.58), False),
        ((0.1, 0.2, 0.3, 0.4, 0.5), False),
    ],
)
def test_validation_that_falls(scores, expected):
    metrics = run_of()
    steps = [10 * k for k in range(len(scores))]
    for step, score in zip(steps, scores, strict=True):
        metrics.setdefault(step, {})["val-aux/made/format/mean@1"] = score
    found = findings(metrics)
    assert bool(found) == expected
    if expected:
        assert found[0].what == "validation of format falls while training rises: 0.600 to 0.400"
        assert "the checkpoint of step 10" in found[0].advice


@pytest.mark.parametrize(
    ("repeated", "what"),
    [
        (lambda rewards: rewards[:, 0] + rewards[:, 1], "brevity equals format + correctness"),
        (lambda rewards: rewards[:, 1], "correctness equals brevity"),
    ],
)
def test_a_reward_that_counts_twice(repeated, what):
    def change(rewards, step):
        rewards[:, 2] = repeated(rewards)
        return rewards

    found = findings(run_of(change))
    whats = {finding.what.partition(" at every step")[0]: finding for finding in found}
    assert (whats[what].first, whats[what].last) == (1, STEPS)


def test_two_rewards_that_are_constant_are_no_copies():
    found = findings(
        run_of(lambda rewards, step: np.column_stack([rewards[:, 0], 0 * rewards[:, :2]]))
    )
    assert len(found) == 2 and all("lowest value" in each.what for each in found)


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
    assert HOLD == 5
    assert stretch({step: sign == "#" for step, sign in enumerate(holds)}) == expected


def test_a_run_without_our_metrics_has_no_findings():
    assert findings({}) == findings({1: {"critic/score/mean": 1.0}, 2: {}}) == []
    assert findings({step: {"gdpo/format/varies": float("nan")} for step in range(9)}) == []
