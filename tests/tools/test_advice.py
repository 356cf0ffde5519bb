"""What GDPO would change: the verdicts on rewards whose truth is known, and the numbers by hand."""

import re
import shutil
from itertools import combinations

import numpy as np
import pytest
from run_folder_writer import make_run

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.metrics import batch_metrics, verl_grpo_settings
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.run.dump_reader import dump_files
from verl_gdpo.tools import replay
from verl_gdpo.tools.advice import advise, describe
from verl_gdpo.tools.advice.evidence import FIRST_STEPS, Evidence, look, without_outliers
from verl_gdpo.tools.report.page import build_page, write

DEFAULT = GdpoSettings()
PROMPTS, SAMPLES = 16, 8
GROUPS = np.repeat(np.arange(PROMPTS), SAMPLES)


def matrix_of(values, weights=None, present=None, names=("format", "length", "other")):
    values = np.array(values, dtype=float)
    present = np.ones(values.shape, bool) if present is None else np.array(present)
    weights = weights or [1.0] * values.shape[1]
    return RewardMatrix(dict(zip(names, weights, strict=False)), values * present, present)


def step(values, groups=GROUPS, **more):
    return look(matrix_of(values, **more), np.ones(len(values), bool), groups)


def seen(values_of_step, steps=FIRST_STEPS, **more):
    """The evidence of steps, each made with a step's number and random numbers."""
    chance = np.random.default_rng(0)
    return Evidence([step(values_of_step(t, chance), **more) for t in range(steps)])


def met(chance, share):
    return (chance.random(PROMPTS * SAMPLES) < share).astype(float)


def learned(chance, t, size=1.0):
    return size * met(chance, 0.2 + 0.015 * t)


# --- the verdicts ---------------------------------------------------------------------------------


def identical(t, chance):
    return np.stack([learned(chance, t)] * 2, axis=1)


def cancelling(t, chance):
    format = met(chance, 0.4)
    return np.stack([format, 1 - format + 0.05 * chance.normal(size=len(format))], axis=1)


def small_length(t, chance):
    return np.stack([learned(chance, t), learned(chance, t, 0.17)], axis=1)


def with_an_outlier(size):
    def values(t, chance):
        found = small_length(t, chance)
        found[13, 0] = size if t == 7 else found[13, 0]
        return found

    return values


def by_prompt(t, chance):
    scale = np.where(GROUPS[:, None] % 2, [1.0, 9.0], [9.0, 1.0])
    return equal(t, chance) * scale


def equal(t, chance):
    return np.stack([learned(chance, t), learned(chance, t)], axis=1)


def excluding(t, chance):
    either = chance.random(len(GROUPS))
    return np.stack([3.0 * (either < 0.3 + 0.01 * t), either > 0.7], axis=1)


def alone(t, chance):
    return np.stack([learned(chance, t), np.ones(len(GROUPS))], axis=1)


CASES = {
    "identical": (identical, "same", "GDPO changes nothing"),
    "cancelling": (cancelling, "cancel", "Under GDPO format and length cancel"),
    "small length": (small_length, "large", "GDPO changes which reward counts"),
    "an outlier above": (with_an_outlier(1e6), "large", "GDPO changes which reward counts"),
    "an outlier below": (with_an_outlier(-1e6), "large", "GDPO changes which reward counts"),
    "by prompt": (by_prompt, "by prompt, alike", "GDPO hardly changes"),
    "equal": (equal, "equal", "GDPO hardly changes which reward counts"),
    "excluding": (excluding, "exclude", "GDPO changes which reward counts"),
    "alone": (alone, "one reward", "GDPO changes nothing"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name):
    values, rule, change = CASES[name]
    found = seen(values)
    advice = advise(found)
    assert (advice.rule.name, advice.is_sure) == (rule, True)
    first, second = describe(found).sentences
    assert first.startswith(change)
    assert second.startswith("Train with ") and advice.rule.symptom in second


def test_unlike_dumps_get_unlike_sentences():
    unlike = [values for name, (values, *_) in CASES.items() if "outlier" not in name]
    assert len({describe(seen(values)).advice for values in unlike}) == len(unlike) == 7


def test_the_share_that_gdpo_changes_has_an_interval():
    """Where both vary, length has 0.17^2 of the variance of format; alone it has all of a group."""
    sentence, _ = describe(seen(small_length)).sentences
    found = re.search(r"the share of (\w+) .* from (\d+)% \[(\d+)%, (\d+)%\] to (\d+)%", sentence)
    share, low, high, now = map(float, found.groups()[1:])
    share = share if found[1] == "length" else 100 - share
    assert 3 <= share <= 8 and 0 < high - low < 5 and 49 <= now <= 51


def test_few_groups_say_that_they_are_too_few():
    """The spreads differ by a factor of 2, where the rule begins to apply."""

    def at_the_bound(t, chance):
        return np.stack([learned(chance, t), learned(chance, t, 0.5)], axis=1)

    found = seen(at_the_bound, steps=2)
    assert not advise(found).is_sure
    assert "are too few to say what to train with: of groups" in describe(found).sentences[1]


def test_weights_count():
    """With weights that make up for the ranges, GRPO sees equal spreads."""
    assert advise(seen(small_length, weights=[1.0, 1 / 0.17])).rule.name == "equal"
    # 1 - x with the weight -1 is x
    found = seen(lambda t, chance: identical(t, chance) * [1, -1] + [0, 1], weights=[1.0, -1.0])
    assert advise(found).rule.name == "same"
    assert found.measured()[0].together > 1


def test_a_weight_that_follows_a_schedule_counts_with_its_mean():
    chance = np.random.default_rng(0)
    steps = [step(equal(t, chance), weights=[1.0, float(t < 29)]) for t in range(FIRST_STEPS)]
    found = Evidence(steps)
    assert [*found.weights.values()] == [1.0, pytest.approx(29 / 30)]
    assert advise(found).rule.name == advise(seen(equal)).rule.name == "equal"


def test_rewards_that_no_sample_has_together():
    """Two tasks, each with its own reward."""
    present = np.stack([GROUPS % 2 == 0, GROUPS % 2 == 1], axis=1)
    found = seen(small_length, present=present)
    assert advise(found).rule.name == "one reward"
    values = np.concatenate([small_length(0, np.random.default_rng(0))] * 2)
    whole = np.array([[True, True]] * len(GROUPS) + [[True, False]] * len(GROUPS))
    two = Evidence([step(values, np.concatenate([GROUPS, GROUPS + PROMPTS]), present=whole)])
    assert advise(two).rule.name == "large and learned"


def test_nothing_that_varies():
    found = seen(lambda t, chance: np.ones((len(GROUPS), 2)))
    assert advise(found).rule.name == "one reward" and found.measured()[0].rewards == 0


# --- the numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
def test_shares_and_correlations_are_those_of_the_metrics(missing):
    rng = np.random.default_rng(0)
    values = (rng.random((240, 3)) < [0.3, 0.5, 0.4]) * [1.0, 5.0, 0.2]
    values[:, 2] += 0.1 * values[:, 0]
    present = rng.random(values.shape) < 0.8 if missing else np.ones(values.shape, bool)
    groups, names = np.repeat(np.arange(30), 8), ("format", "length", "other")
    matrix = matrix_of(values, [1.0, 0.5, 2.0], present)
    found = Evidence([look(matrix, np.ones(240, bool), groups)])
    for method, settings in (("gdpo", DEFAULT), ("grpo", verl_grpo_settings(DEFAULT))):
        counted, lengths = np.ones(240, bool), np.ones(240, int)
        logged = batch_metrics(matrix, counted, groups, lengths, settings, {})
        shares = [logged[f"gdpo/{name}/share"] for name in names]
        assert found.shares_K(method).tolist() == pytest.approx(shares, abs=1e-9)
    correlations = [
        logged[f"gdpo/{one}/correlation_with_{other}"] for one, other in combinations(names, 2)
    ]
    measured, of = found.measured()
    # the metric takes the means of a group over the samples that have both
    near = 0.05 if missing else 1e-12
    assert measured.correlation == pytest.approx(max(correlations), abs=near)
    assert measured.opposite == pytest.approx(min(correlations), abs=near)
    assert of["correlation"] in ("format, other", "other, format")


def test_steps_may_have_different_rewards():
    first = step([[0, 5], [1, 0]], [0, 0], names="xy")
    second = step([[3, 1], [0, 0]], [0, 0], names="ux")
    both = Evidence([first, second, second])
    assert [*both.weights] == ["x", "y", "u"]
    assert both.numbers["have"].tolist() == [[6, 2, 4], [2, 2, 0], [4, 0, 4]]
    measured, of = both.measured()
    assert (measured.opposite, measured.correlation) == pytest.approx((-1, 1))
    assert {*of["opposite"].split(", ")} == {"x", "y"} and of["spread_ratio"] == "y, x"
    describe(both)


def test_outliers_are_cut_and_rare_rewards_are_not():
    rare = np.array([0.0] * 500 + [1.0] * 3)
    assert without_outliers(rare).tolist() == rare.tolist()
    far = np.append(rare, 1e6)
    assert without_outliers(far).max() == 1 and without_outliers(-far).min() == -1
    graded = np.linspace(0, 1, 1001)
    assert without_outliers(graded).max() == pytest.approx(0.99, abs=0.002)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Shares of 100 other dumps of the same rewards, beside the shares of ten thousand groups."""
    chance = np.random.default_rng(1)

    def dump(prompts):
        values = (chance.random((prompts * 8, 2)) < [0.3, 0.5]) * [1.0, 0.6]
        return Evidence([step(values, np.repeat(np.arange(prompts), 8))])

    truth = dump(10_000).shares_K("grpo")[0]
    inside = 0
    for _ in range(100):
        found = dump(60)
        again = [found.shares_K("grpo", numbers)[0] for numbers in found.drawn_again()]
        low, high = np.percentile(again, (2.5, 97.5))
        inside += low <= truth <= high
    assert inside >= 88


# --- words ----------------------------------------------------------------------------------------


def test_a_terminal_gets_no_control_characters(monkeypatch):
    monkeypatch.setattr("verl_gdpo.terminal.WIDTH", 100)
    found = seen(small_length, names=("good", "\x1b[31mred"))
    assert "\x1b" not in str(describe(found))
    assert all(len(line) <= 100 for line in str(describe(found)).splitlines())


@pytest.mark.slow
def test_replay_and_report_show_it(tmp_path, capsys):
    runs = [make_run(tmp_path / arm, arm) for arm in ("gdpo", "grpo")]
    assert replay.main([str(runs[0]), "--top", "0"]) == 0
    shown = capsys.readouterr().out.split("== What would GDPO change? ==\n\n")[1]
    expected = Evidence.of_dumps(dump_files(runs[0])[0], DEFAULT)
    assert shown.startswith(str(describe(expected)))
    page = build_page(runs)
    assert page.advice == {describe(expected).advice: "gdpo, grpo"}
    text = write(page, tmp_path / "report").read_text()
    assert "gdpo, grpo:</span> " in text
    shutil.rmtree(runs[1] / "rollouts")
    assert "no rollout dump" in [*build_page(runs).advice][1]
