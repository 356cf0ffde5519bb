"""What GDPO would change: shares, orders and weights beside naive loops, and how it is said."""

import shlex
import shutil
from itertools import combinations
from statistics import mean, stdev

import numpy as np
import pytest
from markupsafe import escape
from repository import REPO
from run_folder_writer import make_run

from verl_gdpo.algorithm.matrix import RewardMatrix
from verl_gdpo.algorithm.read_settings import read_settings
from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.tools import replay
from verl_gdpo.tools.advice import FEWEST, WEIGHTS, Evidence, Update, describe
from verl_gdpo.tools.report.page import build_page, with_interval, write
from workshop.experiments import advice

SAMPLES = 8


def matrix_of(values, weights=None, present=None, names=("format", "length", "other", "more")):
    values = np.array(values, dtype=float)
    present = np.ones(values.shape, bool) if present is None else np.array(present)
    weights = weights or [1.0] * values.shape[1]
    return RewardMatrix(dict(zip(names, weights, strict=False)), values * present, present)


def step(values, groups=None, **more):
    groups = np.arange(len(values)) // SAMPLES if groups is None else groups
    return matrix_of(values, **more), np.ones(len(values), bool), groups


def evidence(values, groups=None, settings=GdpoSettings(), **more):  # noqa: B008
    return Evidence([step(values, groups, **more)], settings)


# --- beside naive loops ---------------------------------------------------------------------------


def groups_of(evidence):
    return [np.flatnonzero(evidence.group_B == g).tolist() for g in set(evidence.group_B.tolist())]


def grpo(rewards, group, weights):
    """Each reward's part of the advantages of a group; a missing reward counts as 0."""
    means = [mean(rewards.values_BK[i][k] for i in group) for k in range(len(weights))]
    parts = [
        [w * (rewards.values_BK[i][k] - means[k]) for k, w in enumerate(weights)] for i in group
    ]
    std = stdev(map(sum, parts))
    return [[part / std if std > 1e-9 else 0.0 for part in of] for of in parts]


def gdpo(rewards, group, weights, eps=1e-4):
    parts = [[0.0] * len(weights) for _ in group]
    for k, weight in enumerate(weights):
        there = [n for n, i in enumerate(group) if rewards.present_BK[i][k]]
        values = [rewards.values_BK[group[n]][k] for n in there]
        for n, value in zip(there, values, strict=True):
            if len(there) > 1 and stdev(values) > 1e-9:
                parts[n][k] = weight * (value - mean(values)) / (stdev(values) + eps)
    return parts


def naive_shares(estimator, evidence, weights):
    shares, whole = [0.0] * len(weights), 0.0
    for group in groups_of(evidence):
        for parts in estimator(evidence.rewards, group, weights):
            whole += sum(parts) ** 2
            shares = [share + part * sum(parts) for share, part in zip(shares, parts, strict=True)]
    return [share / whole for share in shares]


chance = np.random.default_rng(0)
x, y, z = chance.random((3, 480))
one_task = np.arange(480) // SAMPLES % 3 > 0
CASES = {
    "ranges": evidence(np.stack([x < 0.3, 6 * (y < 0.5)], 1)),
    "a bonus that spoils the answer": evidence(
        np.stack([x < 0.5, 0.05 * (y < np.where(x < 0.5, 0.3, 0.6))], 1), names=("answer", "bonus")
    ),
    "noise": evidence(np.stack([x < 0.5, 0.002 * y, 0.002 * z], 1)),
    "four with weights": evidence(
        np.stack([x < 0.2, 5 * y, 0.1 * (y + z), 3 * x], 1), weights=[1.0, 0.5, 2.0, -1.0]
    ),
    "some missing": evidence(
        np.stack([x < 0.4, 4 * (y < 0.6), z], 1),
        present=np.stack([x < 0.9, one_task, np.ones(480, bool)], 1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_shares_beside_a_naive_loop(name):
    case = CASES[name]
    shown = [update.share_K.tolist() for update in case.updates]
    by_range = [w / case.ranges[name] for name, w in case.rewards.weights.items()]
    arms = (grpo, case.weights_K), (grpo, by_range), (gdpo, case.weights_K)
    for shares, (estimator, weights) in zip(shown, arms, strict=True):
        assert shares == pytest.approx(naive_shares(estimator, case, weights), abs=1e-5)
        assert sum(shares) == pytest.approx(1)


@pytest.mark.parametrize("name", CASES)
def test_with_the_weights_gdpo_has_the_shares_of_grpo(name):
    case = CASES[name]
    shares = naive_shares(grpo, case, case.weights_K)
    keeping = case.keeping_weights()
    assert keeping.is_kept and keeping.share_K.tolist() == pytest.approx(shares, abs=1e-5)
    found = naive_shares(gdpo, case, keeping.weights_K)
    assert found == pytest.approx(shares, abs=1e-5)
    # and with those that are printed, which have three digits
    sentence, line = describe(case).choices[-1]
    assert sentence == "To keep the balance that GRPO gives now, use these weights with GDPO:"
    assert naive_shares(gdpo, case, weights_in(line)) == pytest.approx(shares, abs=0.004)


def weights_in(line):
    """The weights of an override that names nothing else of a reward."""
    [override] = shlex.split(line)
    printed = override.removeprefix("++algorithm.gdpo.rewards={").removesuffix("}").split(", ")
    return [float(pair.split(": ")[1]) for pair in printed]


@pytest.mark.parametrize("name", CASES)
def test_the_spreads_stand_first_and_before_them_what_they_are_for(name):
    case = CASES[name]
    spreads = []
    for k in range(len(case.weights_K)):
        squares = 0.0
        for group in groups_of(case):
            values = [case.rewards.values_BK[i][k] for i in group]
            squares += sum((value - mean(values)) ** 2 for value in values)
        spreads.append(squares**0.5)
    expected = [w * of / max(spreads) for w, of in zip(case.weights_K, spreads, strict=True)]
    said = describe(case)
    spreads, balance = said.choices
    assert weights_in(spreads.line) == pytest.approx(expected, rel=0.006)
    assert balance.line and balance.line != spreads.line
    shown = " ".join(str(said).split())
    parts = [WEIGHTS, spreads.sentence, spreads.line, balance.sentence, balance.line]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)


def test_weights_that_a_solver_misses_from_one_start():
    """The other reward counts 5 and is lost by most right answers: GRPO gives it .976.

    From the spreads, a solver ends at 1.003 and -.003, although the factors .565 and 1 are exact.
    """
    x, y = np.random.default_rng(2).random((2, 64))
    case = evidence(np.stack([x < 0.5, 5 * ((y < 0.7) & (x > 0.3))], 1))
    shares = naive_shares(grpo, case, case.weights_K)
    assert shares == pytest.approx([0.024, 0.976], abs=1e-3)
    keeping = case.keeping_weights()
    assert keeping.is_kept and keeping.weights_K.tolist() == pytest.approx([0.565, 1], abs=1e-3)
    assert naive_shares(gdpo, case, keeping.weights_K) == pytest.approx(shares, abs=1e-4)


def test_it_says_what_the_nearest_weights_reach_where_none_keep_the_shares():
    """The length pulls against the format where it moves much, and with it where it moves little.

    So it has a share below 0 under GRPO; under GDPO it correlates with the format in 2 of 3 groups,
    and no weight makes its share negative.
    """
    against, along = [[1, 0], [1, 0], [0, 5], [0, 5]], [[10, 1], [10, 1], [0, 0], [0, 0]]
    case = evidence(np.concatenate([against, along, along]) * [1, 0.1], np.arange(12) // 4)
    share = naive_shares(grpo, case, [1, 1])[1]
    assert share < 0
    keeping = case.keeping_weights()
    assert not keeping.is_kept and keeping.missed == pytest.approx(-share, abs=1e-5)
    said = describe(case)
    assert "To keep the balance" not in str(said)
    assert said.choices[-1] == (
        "No weights were found with which GDPO keeps the balance that GRPO gives now. The nearest "
        "ones reach format 100.0%, length 0.0%, and so miss it by up to "
        f"{-100 * share:.2g} percentage points.",
        "",
    )
    assert [bool(choice.line) for choice in said.choices] == [True, False]


@pytest.mark.parametrize("name", CASES)
def test_orders_beside_a_naive_loop(name):
    case, counts, pairs = CASES[name], [0, 0, 0], 0
    for group in groups_of(case):
        new_and_old = (
            gdpo(case.rewards, group, case.weights_K, eps=0),
            grpo(case.rewards, group, case.weights_K),
        )
        for i, j in combinations(range(len(group)), 2):
            new, old = (np.sign(round(sum(of[i]) - sum(of[j]), 6)) for of in new_and_old)
            pairs += 1
            counts[0] += new * old < 0
            counts[1] += bool(new) and not old
            counts[2] += bool(old) and not new
    assert case.changed_preferences.tolist() == pytest.approx([n / pairs for n in counts])


def test_orders_by_hand():
    """z of the format: (1, 1, -1, -1) c; of the length the same numbers otherwise.

    GRPO sees 2, 3, 1, 0. GDPO sees 0 for the first and the third, and so prefers none of this
    pair of six.
    """
    rows = [[2, 0], [2, 1], [0, 1], [0, 0]]
    assert evidence(rows, [0] * 4).changed_preferences.tolist() == [0, 0, 1 / 6]
    # with the weights 1 and 2, GRPO prefers neither the first nor the third, and GDPO the third
    case = evidence(rows, [0] * 4, weights=[1.0, 2.0])
    assert case.changed_preferences.tolist() == [0, 1 / 6, 0]
    # GRPO sees 3, 5, 2, 0, and so the first one above the third
    case = evidence([[3, 0], [3, 1], [0, 1], [0, 0]], [0] * 4, weights=[1.0, 2.0])
    assert case.changed_preferences.tolist() == [1 / 6, 0, 0]


# --- the interval ---------------------------------------------------------------------------------


def test_an_interval_by_hand():
    """Shares 1, 1, 0, 0, and 1 and 0 of the two that are added: mean 1/2, squares 6/4.

    The error is sqrt(1.5 / (6 x 5)) = 0.2236, and t(.975, 3) = 3.182.
    """
    products, squares = np.array([[7.0], [7.0], [0.0], [0.0], [0.0]]), np.array([7.0] * 4 + [0.0])
    low, high = Update(products, squares).interval_2K
    assert (low[0], high[0]) == pytest.approx((0.5 - 0.7116, 0.5 + 0.7116), abs=1e-3)
    assert Update(products[1:], squares[1:]).interval_2K is None and FEWEST == 4


@pytest.mark.parametrize("name", ["the same, ranges 1 and 6", "rare, 2 %"])
def test_intervals_of_few_groups_hold_the_truth(name, monkeypatch):
    """Without the two groups that are added, half of the first one's intervals miss it."""
    monkeypatch.setattr(advice, "GROUPS", 2_000)
    monkeypatch.setattr(advice, "DUMPS", 300)
    for update in advice.population(advice.TUNING[name]):
        assert min(advice.coverage(update, 24)) > 0.92


# --- what a run may have --------------------------------------------------------------------------


def test_steps_may_have_different_rewards_and_weights():
    first = step([[0, 5], [1, 0]], [0, 0], names="xy")
    second = step([[3, 1], [0, 0]], [0, 0], names="ux", weights=[2.0, 0.5])
    both = Evidence([first, second, second], GdpoSettings())
    assert both.rewards.weights == {"x": pytest.approx(2 / 3), "y": 1, "u": 2}
    assert both.ranges == {"x": 1, "y": 5, "u": 3} and len(set(both.group_B)) == 3
    assert both.rewards.present_BK.sum(0).tolist() == [6, 2, 4]


def test_declared_bounds_are_the_range_and_a_weight_of_0_counts_nowhere():
    settings = read_settings({"gdpo": {"rewards": {"format": {"bounds": [0, 4]}, "length": 0}}})
    case = evidence(np.stack([x < 0.3, y], 1), settings=settings, weights=[1.0, 0.0])
    assert case.ranges == {"format": 4}
    # one reward is left
    [choice] = describe(case).choices
    assert choice.sentence.startswith("Fewer than two rewards vary") and choice.line == ""
    assert WEIGHTS[:40] not in str(describe(case))
    columns = np.stack([x < 0.3, y, y + z], 1)
    case = evidence(columns, settings=settings, weights=[1.0, 0.0, 1.0])
    assert list(case.ranges) == ["format", "other"]
    for choice in describe(case).choices:
        assert "{format: {bounds: [0, 4], weight: " in choice.line
        assert "length: 0, other: " in choice.line


def test_the_line_keeps_what_else_is_set():
    when = {"reward": "format", "at_least": 1}
    rewards = {"format": 1.0, "length": {"weight": {0: 1.0, 9: 0.5}, "when": when}, "other": None}
    case = CASES["ranges"]
    case = Evidence([step(case.rewards.values_BK)], read_settings({"gdpo": {"rewards": rewards}}))
    by_spread, balance = describe(case).choices
    for factor, choice in (
        (case.spread_weights()[0], by_spread),
        (case.keeping_weights().weights_K[0], balance),
    ):
        assert choice.line == (
            f"'++algorithm.gdpo.rewards={{format: {factor:.3g}, length: {{weight: 1.0, "
            "when: {reward: format, at_least: 1}}, other: null}'"
        )


def test_rewards_that_never_vary_or_cancel():
    constant = evidence(np.ones((480, 2)))
    cancels = evidence(np.stack([x < 0.5, x >= 0.5], 1))
    for case in (constant, cancels):
        assert case.keeping_weights() is None
        assert case.spread_weights().tolist() == [1, 1]
        assert describe(case).rows[0][2:] == ["0% (too few groups)"] * 3
    [choice] = describe(constant).choices
    assert choice.sentence.startswith("Fewer than two rewards vary")
    spreads, balance = describe(cancels).choices
    assert "{format: 1.0, length: 1.0}" in spreads.line
    assert balance.sentence.startswith("GRPO updates nothing") and balance.line == ""
    case = evidence(np.stack([x < 0.5, np.full(480, 0.1)], 1))
    assert case.updates[2].share_K.tolist() == [1, 0]
    assert case.keeping_weights().weights_K.tolist() == [1, 1]
    assert case.spread_weights().tolist() == [1, 1]
    assert not case.can_be_balanced


def test_a_reward_of_one_sample_a_group_counts_under_grpo_alone():
    """No weight gives it a share under GDPO, so that none keeps the shares."""
    rng = np.random.default_rng(3)
    values = np.column_stack([rng.random(480), rng.random(480), np.ones(480)])
    present = np.ones(values.shape, bool)
    present[:, 2] = np.arange(480) % SAMPLES == 0
    case = evidence(values, present=present)
    assert case.updates[0].share_K[2] > 0.1
    assert case.updates[2].share_K[2] == 0
    kept = case.keeping_weights()
    assert kept.share_K[2] == 0 and kept.missed >= case.updates[0].share_K[2]
    assert not kept.is_kept
    assert not evidence(values[:, 1:], present=present[:, 1:]).can_be_balanced


# --- words ----------------------------------------------------------------------------------------


def test_the_example_of_the_page_is_what_is_shown(monkeypatch):
    monkeypatch.setattr("verl_gdpo.terminal.WIDTH", 100)
    shown = f"```\n{describe(CASES['a bonus that spoils the answer'])}\n```"
    assert shown in (REPO / "docs" / "decide.md").read_text()


def test_replay_and_report_show_it(tmp_path, capsys):
    runs = [make_run(tmp_path / arm, arm) for arm in ("gdpo", "grpo")]
    assert replay.main([str(runs[0]), "--top", "0"]) == 0
    shown = capsys.readouterr().out.split("== What would GDPO change? ==\n\n")[1]
    page = build_page(runs)
    assert shown.startswith(str(page.advice["gdpo"]))
    text = write(page, tmp_path / "report").read_text()
    # each of two runs has a table, with the numbers that the terminal shows, and each sentence
    assert text.count('<th scope="col">GRPO by range</th>') == 2
    for share in page.advice["grpo"].rows[0][2:]:
        assert text.count(f"<td>{with_interval(share)}</td>") >= 2
    for sentence in page.advice["grpo"].sentences:
        assert text.count(f"<p>{escape(sentence)}</p>") == 2
    for choice in page.advice["grpo"].choices:
        assert text.count(f"<p>{escape(choice.sentence)}</p>") == 2
        if choice.line:
            assert f'<code class="line">{escape(choice.line)}</code>' in text
    shutil.rmtree(runs[1] / "rollouts")
    assert "no dump" in build_page(runs).advice["grpo"]
