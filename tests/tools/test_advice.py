"""What GDPO would change: the numbers by hand and by naive loops, the rules by the simulation."""

import shutil
from itertools import combinations

import numpy as np
import pytest
from run_folder_writer import make_run

from verl_gdpo.batch.advantages import correlation
from verl_gdpo.batch.matrix import RewardMatrix
from verl_gdpo.batch.metrics import batch_metrics, verl_grpo_settings
from verl_gdpo.run.dump_reader import dump_files
from verl_gdpo.settings.algorithm import GdpoSettings
from verl_gdpo.tools import replay
from verl_gdpo.tools.advice import RULES, advise, describe
from verl_gdpo.tools.advice.evidence import Evidence, look
from verl_gdpo.tools.report.page import build_page, write
from workshop.experiments.map import compare, results
from workshop.experiments.map.arms import ARMS
from workshop.experiments.map.settings import SETTINGS
from workshop.experiments.map.simulate import make_problem, train

DEFAULT = GdpoSettings()


def one_step(values, groups, weights=None, present=None, names="xyuv"):
    values = np.array(values, dtype=float)
    present = np.ones(values.shape, bool) if present is None else np.array(present)
    weights = weights or [1.0] * values.shape[1]
    matrix = RewardMatrix(dict(zip(names, weights, strict=False)), values * present, present)
    return look(matrix, np.ones(len(values), bool), groups), matrix


def seen(values, groups, settings=DEFAULT, **more):
    return Evidence([one_step(values, groups, **more)[0]], settings)


def random_batch(seed, prompts=30, samples=8, missing=False):
    rng = np.random.default_rng(seed)
    values = (rng.random((prompts * samples, 3)) < [0.3, 0.5, 0.4]) * [1.0, 5.0, 0.2]
    values[:, 2] += 0.1 * values[:, 0]
    present = rng.random(values.shape) < 0.8 if missing else np.ones(values.shape, bool)
    return values * present, present, np.repeat(np.arange(prompts), samples)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [False, True])
def test_shares_and_correlations_are_those_of_the_metrics(missing):
    values, present, groups = random_batch(0, missing=missing)
    weights = [1.0, 0.5, 2.0]
    step, matrix = one_step(values, groups, weights, present)
    found = Evidence([step], DEFAULT)
    for method, settings in (("gdpo", DEFAULT), ("grpo", verl_grpo_settings(DEFAULT))):
        counted, lengths = np.ones(len(values), bool), np.ones(len(values), int)
        logged = batch_metrics(matrix, counted, groups, lengths, settings, {})
        shares = [logged[f"gdpo/{name}/share"] for name in "xyu"]
        assert found.shares_K(method).tolist() == pytest.approx(shares, abs=1e-12)
    for j, k in combinations(range(3), 2):
        logged_one = logged[f"gdpo/{'xyu'[j]}/correlation_with_{'xyu'[k]}"]
        assert found.correlation(j, k) == pytest.approx(logged_one, abs=1e-12)
    pairs = found.pairs
    assert pairs.tied_grpo / pairs.different == logged["gdpo/tied_pairs_grpo"]
    assert pairs.tied_gdpo / pairs.different == logged["gdpo/tied_pairs_gdpo"]


def test_pairs_by_hand():
    # group a: sums 1, 1, 3; z of x is -h -h 2h with h = 1/sqrt(3), and of y 2h -h -h of 1 0 0
    # group b: x 0 1 1 1, y 9 0 0 0, and the third sample lacks y
    values = [[0, 1], [1, 0], [1, 0], [0, 9], [1, 0], [1, 0], [1, 0]]
    present = [[True, True]] * 5 + [[True, False], [True, True]]
    pairs = seen(values, list("aaabbbb"), present=present).pairs
    # a: the first differs from the other two. b: all but (1, 3), which are equal
    assert pairs.different == 2 + 5
    assert pairs.opposed == 2 + 2  # x prefers one, y the other
    # a: sums 1 1 1. b: 9 1 1 1, of which (1, 2) and (2, 3) differ in having y
    assert pairs.tied_grpo == 2 + 2
    # a: z of x and of y are -2h h h and 2h -h -h, which cancel.
    # b: x -1.5 .5 .5 .5 and y 1.1547 -.5774 - -.5774, so S is -.35 -.08 .5 -.08
    assert pairs.tied_gdpo == 2
    # b: GRPO prefers the first to all, GDPO likes it least
    assert pairs.turned == 3


def test_pairs_are_those_of_a_naive_loop():
    values, present, groups = random_batch(1, prompts=12, samples=5, missing=True)
    order = np.random.default_rng(2).permutation(len(values))
    values, present, groups = values[order], present[order], groups[order]
    weights = np.array([1.0, -0.5, 0.0])
    pairs = seen(values, groups, weights=[*weights], present=present).pairs
    different = opposed = 0
    for a, b in combinations(range(len(values)), 2):
        if groups[a] == groups[b]:
            both = present[a] & present[b] & (weights != 0)
            more = np.where(both, (values[a] - values[b]) * weights, 0)
            lacking = ((present[a] != present[b]) & (weights != 0)).any()
            different += bool(more.any() or lacking)
            opposed += bool((more > 0).any() and (more < 0).any())
    assert (pairs.different, pairs.opposed) == (different, opposed)


def test_rescaling_makes_ranges_irrelevant_and_nothing_else():
    values, _, groups = random_batch(3)
    plain, stretched = (seen(values * factor, groups) for factor in (1, [1, 40, 0.1]))
    assert stretched.with_gdpo("rescaled") == pytest.approx(plain.with_gdpo("rescaled"), abs=2e-3)
    assert stretched.with_gdpo("grpo") < plain.with_gdpo("grpo") - 0.05
    # with one range per prompt, rescaling does as little as nothing
    factor = np.where(groups[:, None] % 2, [1, 40, 0.1], [40, 0.1, 1])
    by_prompt = seen(values * factor, groups)
    assert by_prompt.with_gdpo("rescaled") < plain.with_gdpo("rescaled") - 0.05
    assert by_prompt.factor_by_prompt(0, 1) > 10 > 2 > plain.factor_by_prompt(0, 1)
    # GRPO on rewards of equal spread, in numpy
    spread = [np.sqrt(np.mean([v.std(ddof=1) ** 2 for v in column])) for column in by_group(values)]
    total = (values / spread).sum(1)
    ours, gdpo = (
        np.concatenate([standard(v[groups == g]) for g in range(30)])
        for v in (total[:, None], values)
    )
    assert plain.with_gdpo("rescaled") == pytest.approx(correlation(ours, gdpo), abs=1e-3)


def by_group(values):
    return [column.reshape(30, 8) for column in values.T]


def standard(values):
    """The sum of the columns, each with mean 0 and std 1."""
    std = values.std(0, ddof=1)
    return ((values - values.mean(0)) / np.where(std > 0, std, np.inf)).sum(1)


def test_steps_may_have_different_rewards():
    first, _ = one_step([[0, 5], [1, 0]], [0, 0], names="xy")
    second, _ = one_step([[3, 1], [0, 0]], [0, 0], names="ux")
    both = Evidence([first, second, second], DEFAULT)
    assert both.names == ["x", "y", "u"]
    assert both.range_K.tolist() == [1, 5, 3]
    assert both.sums.have_KK.tolist() == [[6, 2, 4], [2, 2, 0], [4, 0, 4]]
    assert both.correlation(0, 1) == pytest.approx(-1)
    assert both.correlation(0, 2) == pytest.approx(1)
    assert both.correlation(1, 2) == 0
    assert np.isnan(both.mean_TK).tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 0]]
    describe(both)


# --- the theory ----------------------------------------------------------------------------------


def test_the_theory_of_influence_and_noise():
    """`w' C w / m` is the noise of a group's gradient per unit of score variance.

    Source: the theory of multireward-grpo 0.1.1 (PyPI), with ddof 0. C is a group's correlation of
    rewards, with a row of zeros for a reward that is constant in it.
    """
    values, _, groups = random_batch(4, prompts=200)
    weights = np.array([1.0, 0.5, 2.0])
    found = seen(values, groups, weights=[*weights])
    C_GKK = np.stack([_correlations(values[groups == g]) for g in range(200)])
    C = C_GKK.mean(0)
    # the mean of S^2, from which the covariances come, is w' C w times (m - 1) / m; but for eps
    noise = found.sums.gdpo / len(values)
    assert noise == pytest.approx(weights @ C @ weights * 7 / 8, rel=2e-3)
    expected = weights * (C @ weights) / (weights @ C @ weights)
    assert found.shares_K("gdpo").tolist() == pytest.approx(expected, abs=1e-3)


def _correlations(values):
    centred = values - values.mean(0)
    std = values.std(0)
    z = np.where(std > 0, centred / np.where(std > 0, std, 1), 0)
    return z.T @ z / len(values)


# --- the rules -----------------------------------------------------------------------------------


def simulated(name, steps):
    """The rewards of a training of the simulation with GRPO, as the dump of a run."""
    raw_TKGP = []

    def recording(rewards):
        raw_TKGP.append(rewards.raw_KGRP[:, :, 0, 0, :].astype(float))
        return ARMS["grpo"](rewards)

    rate = results.read()[results.Key("one scale", name, "grpo")][0].rate
    train(make_problem(SETTINGS[name], [0]), recording, [rate])
    K, G, P = raw_TKGP[0].shape
    groups = np.repeat(np.arange(P), G)
    looks = [
        one_step(raw.transpose(2, 1, 0).reshape(P * G, K), groups, names="abcdef")[0]
        for raw in raw_TKGP[:steps]
    ]
    return Evidence(looks, DEFAULT)


HELPS, LITTLE, HARMS = (0.02, 1.0), (-0.02, 0.025), (-1.0, -0.01)
SIMULATED = [
    # the larger range is easier to learn, or both are hard
    ("two, 3:1", "ranges", HELPS),
    ("two, 20:1", "ranges", HELPS),
    ("two answers, 6:1", "ranges", HELPS),
    ("four, x 8 4 2 1", "ranges", HELPS),
    # the larger range is harder to learn
    ("format x 1, answer 6 % x 4", "ranges", LITTLE),
    ("format x 1, answer 6 % x 16", "ranges", LITTLE),
    ("four, an answer x 6", "ranges", LITTLE),
    ("as ToolRL: format x 1, graded x 6", "ranges", LITTLE),
    # equal ranges: one is easy, or all are hard
    ("two, 1:1", "equal", LITTLE),
    ("six, equal", "equal", LITTLE),
    ("wrong in 20 %, 1:1", "equal", LITTLE),
    ("two, a factor by prompt", "equal", LITTLE),
    ("two answers, 1:1", "equal", HELPS),
    ("four answers, equal", "equal", HELPS),
    # ranges that depend on the prompt: all are hard, or one is easy
    ("two answers, range by prompt", "by prompt", HELPS),
    ("four answers, range by prompt", "by prompt", HELPS),
    ("two, range by prompt", "by prompt", LITTLE),
    ("two, range of one by prompt", "by prompt", LITTLE),
    # rewards that are noise in part can be learned
    ("wrong in 20 %, 6:1", "ranges", HELPS),
    ("half noise, 6:1", "ranges", HELPS),
    # noise
    ("two and noise of 1", "chance", LITTLE),
    ("two and noise of 0.05", "chance", HARMS),
    ("two and four noises of 0.05", "chance", HARMS),
    # the range is meant as a weight, or not
    ("conflict, 6:1, judged by range", "conflict", HARMS),
    ("conflict, 6:1", "conflict", LITTLE),
]


OF_EACH_RULE = (
    *("two, 3:1", "two, 1:1", "two answers, range by prompt"),
    *("two and noise of 1", "conflict, 6:1"),
)


@pytest.mark.parametrize(
    ("name", "rule", "claim"),
    [
        pytest.param(*case, marks=() if case[0] in OF_EACH_RULE else pytest.mark.slow)
        for case in SIMULATED
    ],
)
def test_the_rules_claim_what_the_simulation_found(name, rule, claim):
    assert advise(simulated(name, 100)).rule == rule
    low, high = claim
    assert low <= compare.gain(results.read(), "one scale", name).mean <= high


def test_the_simulation_tells_prompts_that_differ_in_scale():
    """The numbers that `describe` quotes, from settings at both ends."""
    factors = {}
    for name in ("two, 6:1, 4 samples", "half noise, 6:1", "two, range of one by prompt"):
        factors[name] = simulated(name, 100).factor_by_prompt(0, 1)
    assert [*factors.values()] == pytest.approx([1.1, 1.5, 3.1], abs=0.15)


def test_every_rule_has_a_batch():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(40), 8)
    fair = (rng.random((320, 2)) < 0.5).astype(float)
    apart = np.where(rng.random((320, 1)) < 0.5, [1.0, 0.0], [0.0, 1.0])
    prompts = np.where(groups[:, None] % 2, [1.0, 9.0], [9.0, 1.0])
    rising = [np.column_stack([rng.random(320) < t / 40, rng.random(320)]) for t in range(2, 38)]
    by_rule = {
        "too few": seen(fair * [1, 0], groups),
        "chance": Evidence([one_step(values, groups)[0] for values in rising], DEFAULT),
        "conflict": seen(apart * [3, 1], groups),
        "by prompt": seen(fair * prompts, groups),
        "weights": seen(fair * [6, 1], groups, weights=[1.0, 6.0]),
        "ranges": seen(fair * [6, 1], groups),
        "equal": seen(fair, groups),
    }
    assert {rule: advise(found).rule for rule, found in by_rule.items()} == {r: r for r in RULES}
    sentences = [advise(found).sentence for found in by_rule.values()]
    assert all(". " not in sentence and not sentence.endswith(".") for sentence in sentences[1:])
    assert "y, which" not in sentences[1] and "move y in 36 steps" in sentences[1]
    assert sentences[5].startswith("x has 6 times the range of y: GDPO helps if x is no harder")


def test_nothing_to_compare():
    groups = list("aabb")
    for values, present, text in (
        ([[1, 2]] * 4, None, "neither estimator trains anything"),
        ([[0, 2], [1, 2]] * 2, None, "Only x differs within groups"),
        # two tasks, each with its own reward
        (
            [[0, 0], [9, 0], [0, 0], [0, 1]],
            [[True, False]] * 2 + [[False, True]] * 2,
            "No sample has two of the rewards",
        ),
    ):
        found = seen(values, groups, present=present)
        assert text in advise(found).sentence
        assert advise(found).rule == "too few"
        describe(found)


def test_declared_bounds_are_the_ranges():
    found = seen([[0, 1], [1, 0], [1, 1], [0, 0]], list("aabb"), settings=bounded(x=(0, 4)))
    assert found.range_K.tolist() == [4, 1]
    assert advise(found).rule == "ranges"


def bounded(**bounds):
    return GdpoSettings(bounds=bounds)


def test_noise_is_not_seen_in_a_few_steps():
    assert advise(simulated("two and noise of 0.05", 9)).rule == "ranges"


# --- words ---------------------------------------------------------------------------------------


def test_a_terminal_gets_no_control_characters():
    values, _, groups = random_batch(5)
    found = seen(values, groups, names=["good", "\x1b[31mred", "u"])
    assert "\x1b" not in str(describe(found))
    assert all(len(line) <= 100 for line in str(describe(found)).splitlines())


@pytest.mark.slow
def test_replay_and_report_show_it(tmp_path, capsys):
    runs = [make_run(tmp_path / arm, arm) for arm in ("gdpo", "grpo")]
    assert replay.main([str(runs[0]), "--top", "0"]) == 0
    shown = capsys.readouterr().out.split("== What would GDPO change? ==\n\n")[1]
    expected = Evidence.of_dumps(dump_files(runs[0])[0], DEFAULT)
    assert expected.range_K.tolist() == [1, 1]
    assert shown.startswith(str(describe(expected)))
    page = build_page(runs)
    assert page.advice == {describe(expected).advice: "gdpo, grpo"}
    text = write(page, tmp_path / "report").read_text()
    assert "gdpo, grpo:</span> " in text
    shutil.rmtree(runs[1] / "rollouts")
    assert "no rollout dump" in [*build_page(runs).advice][1]


def dumped(uid, **rewards):
    keys = {"group": "g", "session": 0, "data_source": "s", "response_tokens": 1}
    more = {"trained_tokens": 1, "rewards": rewards, "advantage": 0.0, "is_padding": False}
    return {"uid": uid, **keys, **more}
