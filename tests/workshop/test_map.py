"""The map of when GDPO helps: its arms, its training, its data, and what the page says of them."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from naive_training import naive_hits, package_advantages
from repository import REPO

from workshop.experiments.map import __main__ as command
from workshop.experiments.map import compare, page, pictures, results, simulate
from workshop.experiments.map.arms import ARMS, Rewards
from workshop.experiments.map.settings import PROMPTS, SETTINGS, TOKENS

FOUND = results.read()

# --- the simulation -------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-6), (np.float32, 1e-5)])
def test_an_arm_is_the_packages(arm, dtype, error):
    chance = np.random.default_rng(0)
    K, G, R, P = 3, 8, 5, 6
    bound_K = np.array([7.3, 0.3, 0.3])  # whose multiples are rounded
    raw_KGRP = (chance.random((K, G, R, P)) < 0.3).astype(float)
    raw_KGRP[2] = chance.random((G, R, P))  # one reward that is not binary
    raw_KGRP[:, :, 1, :4] = 1  # groups without signal
    raw_KGRP[1, :, 2] = 0  # a reward that is constant everywhere
    raw_KGRP[0, :, 3], raw_KGRP[2, :, 3] = 0, 1 - raw_KGRP[1, :, 3]  # two that are opposed
    raw_KGRP = (raw_KGRP * bound_K[:, None, None, None]).astype(dtype)
    A_GRP = ARMS[arm](Rewards.of(raw_KGRP, bound_K.astype(dtype)))
    assert A_GRP.dtype == dtype
    groups = [p for _ in range(G) for p in range(P)]
    for run in range(R):
        expected = package_advantages(arm, raw_KGRP[:, :, run].reshape(K, -1).T, groups, bound_K)
        assert A_GRP[:, run].reshape(-1) == pytest.approx(expected, abs=error), run


@pytest.mark.parametrize(
    ("name", "arm"),
    [
        ("two, 20:1", "gdpo"),
        ("two, range by prompt", "grpo"),
        ("two, 1:1, adam", "gdpo"),
        pytest.param("two, 20:1, sgd", "grpo_spread", marks=pytest.mark.slow),
        ("two and noise of 0.05", "sa_mrpo"),
        pytest.param("wrong in 20 %, 6:1", "dara", marks=pytest.mark.slow),
        pytest.param("as ToolRL: format x 1, graded x 6", "grpo_no_std", marks=pytest.mark.slow),
        pytest.param("hard to have both, 6:1", "gd2po", marks=pytest.mark.slow),
        pytest.param("two, 6:1, 4 samples", "dvao", marks=pytest.mark.slow),
        pytest.param("two, 20:1, uneven start", "rvpo", marks=pytest.mark.slow),
        pytest.param("conflict, 6:1, judged by range", "gdpo_weighted", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_a_naive_loop(name, arm, monkeypatch):
    monkeypatch.setattr(simulate, "STEPS", 5)
    rates = (0.05, 0.3)
    problem = simulate.make_problem(SETTINGS[name], [3, 4], np.float64)
    hit_TKQS = simulate.train(problem, ARMS[arm], rates)
    assert hit_TKQS[0, 0, 0, 0] < hit_TKQS[-1, 0, 1].mean()
    alone = simulate.make_problem(SETTINGS[name], [4], np.float64)
    expected = naive_hits(alone, arm, rates[1], steps=5)
    assert hit_TKQS[:, :, 1, 1] == pytest.approx(expected, abs=1e-7)


def test_a_seed_is_the_same_in_any_company():
    setting = SETTINGS["two, range by prompt"]
    together = simulate.make_problem(setting, [0, 7])
    alone = simulate.make_problem(setting, [7])
    for name in ("accepts_EVLSP", "range_KSP", "start_VLSP", "draws_TLGSP"):
        assert np.array_equal(getattr(together, name)[..., 1:, :], getattr(alone, name)), name


def first_hits(name):
    """How often an untrained policy earns each reward, from the sizes of the allowed sets."""
    if name.startswith("format x 1, answer "):
        share = name.removeprefix("format x 1, answer ").split(" x ")[0]
        rates = {"3 %": 1 / 32, "6 %": 1 / 16, "12 %": 1 / 8, "25 %": 1 / 4, "50 %": 1 / 2}
        return {0: 1 / 8, 1: rates[share]}
    # two sets of 4 of 8 that share one token: another token is in both with probability (3/7)^2
    both = (1 + 7 * (3 / 7) ** 2) / 8
    if name.startswith("one needs the other"):
        return {0: 1 / 8, 1: both**3}
    if name.startswith("short x"):
        return {0: 1 / 8, 1: 1 / 2 if "anyway" in name else both / 4}
    return {k: 1 / 8 for k, reward in enumerate(SETTINGS[name].rewards) if reward.events}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_what_its_name_says(name):
    setting, S = SETTINGS[name], 40
    problem = simulate.make_problem(setting, range(S))
    start = simulate._earned(problem, np.full((TOKENS, 3, 1, S, PROMPTS), 1 / TOKENS))[:, 0]
    for k, hit in first_hits(name).items():
        assert start[k].mean() == pytest.approx(hit, rel=0.06), k
    if "if correct" in name or "one needs the other" in name:
        first_VLSP, second_VLSP = problem.accepts_EVLSP
        assert (second_VLSP <= first_VLSP).all(), "the second is earned without the first"
        assert (second_VLSP < first_VLSP).any()
    has_right_answer = problem.accepts_EVLSP.all(0).any(0).all()
    assert has_right_answer != ("conflict" in name)
    # 8 to the power of a uniform number from -1 to 1 has the mean 1.89 and the mean square 7.69
    factor_SP = problem.range_KSP[0] / setting.rewards[0].range
    assert factor_SP.std() == pytest.approx(2.03 if "by prompt" in name else 0, abs=0.15)


@pytest.mark.parametrize(
    ("name", "rate", "same"),
    # Adam divides gradients that are nearly 0 by themselves, so rounding chooses other tokens soon
    [("two, 20:1", 0.15, 0.9), ("two, 1:1, adam", 0.4, 0)],
)
def test_float32_is_enough(name, rate, same):
    outcome_S = {
        dtype: simulate.train(
            simulate.make_problem(SETTINGS[name], range(32), dtype), ARMS["gdpo"], [rate]
        ).mean((0, 1, 2))
        for dtype in (np.float32, np.float64)
    }
    difference_S = outcome_S[np.float32] - outcome_S[np.float64]
    assert (abs(difference_S) < 1e-4).mean() >= same
    # the standard deviation of a seed is 0.009 with Adam, so the error of the mean is 0.0016
    assert abs(difference_S.mean()) < 0.006


# --- the comparison -------------------------------------------------------------------------------


def test_the_best_rate_is_the_top_of_the_parabola():
    rates = [0.1, 0.2, 0.4, 0.8]
    # its top is at 2^0.25 times the third rate: -(x - 2.25)^2 at x = 0, 1, 2, 3
    outcome_Q = -np.square(np.arange(4) - 2.25)
    assert compare.best_rate(rates, outcome_Q) == (pytest.approx(0.4 * 2**0.25), False)
    assert compare.best_rate(rates, np.array([4, 3, 2, 1])) == (0.1, True)
    assert compare.best_rate(rates, np.array([1, 2, 3, 4])) == (0.8, True)


def test_intervals():
    """For 400 normal numbers they are those of the normal distribution."""
    numbers = np.random.default_rng(1).normal(0.5, 1, 400)
    interval = compare.Bootstrap(400).interval(numbers, settings=50)
    error = numbers.std() / 20
    assert interval.mean == pytest.approx(numbers.mean())
    # 1.96 standard errors leave 5 % outside, and 3.29 leave 5 % / 50
    expected = [numbers.mean() + z * error for z in (-1.96, 1.96, -3.29, 3.29)]
    assert interval[1:] == pytest.approx(expected, abs=0.15 * error)


@pytest.mark.parametrize(
    ("mean", "low", "high", "expected"),
    [
        (0.03, 0.01, 0.05, "more"),
        (0.015, 0.01, 0.02, "a little more"),
        (0.01, -0.01, 0.019, "no difference"),
        (0.01, -0.01, 0.03, "open"),
        (0.05, -0.01, 0.11, "open"),
        (-0.015, -0.02, -0.01, "a little less"),
        (-0.03, -0.05, -0.01, "less"),
    ],
)
def test_a_verdict(mean, low, high, expected):
    # the narrower interval for a single setting decides nothing
    assert results.verdict(compare.Interval(mean, mean, mean, low, high)) == expected


# --- the data -------------------------------------------------------------------------------------


def test_the_data_are_a_whole_run():
    assert [*FOUND.rows] == [*SETTINGS] and len(SETTINGS) >= 40
    assert all([*rows] == [*ARMS] for rows in FOUND.rows.values())
    assert all([*parts] == [*results.PARTS] for parts in FOUND.parts.values())
    assert FOUND.seeds == command.SEEDS
    assert sum(path.stat().st_size for path in results.DATA.iterdir()) < 200_000


def test_no_best_rate_is_at_the_edge_of_those_tried():
    edges = [(name, arm) for name, rows in FOUND.rows.items() for arm in rows if rows[arm].is_edge]
    assert edges == []


@pytest.mark.parametrize("name", SETTINGS)
def test_the_numbers_of_a_setting_fit_each_other(name):
    rows, parts = FOUND.rows[name], FOUND.parts[name]
    for row in rows.values():
        worth = [reward.worth for reward in SETTINGS[name].rewards]
        assert row.outcome == pytest.approx(np.average(row.hits, weights=worth), abs=6e-4)
        interval = row.less_than_gdpo
        assert interval.mean == pytest.approx(rows["gdpo"].outcome - row.outcome, abs=2e-4)
        assert interval.low_all <= interval.low <= interval.mean <= interval.high
        assert interval.high <= interval.high_all
    first = [parts[what].mean for what in [*results.PARTS][:3]]
    assert sum(first) == pytest.approx(FOUND.gain(name).mean, abs=3e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two, 20:1", "two and noise of 0.05"])
def test_a_part_of_the_data_is_made_again(name):
    """In settings without Adam, in which other processors choose the same tokens."""
    rows, _, _ = results.run_setting(name, results.FIRST, len(SETTINGS))
    for arm, row in rows.items():
        kept = FOUND.rows[name][arm]
        assert row.rate == pytest.approx(kept.rate, rel=0.03), arm
        assert row.outcome == pytest.approx(kept.of_first, abs=0.005), arm


def test_what_is_written_is_read(tmp_path):
    results.write(FOUND, tmp_path)
    assert results.read(tmp_path) == FOUND
    for path in results.DATA.iterdir():
        assert (tmp_path / path.name).read_text() == path.read_text()


# --- the page and its pictures --------------------------------------------------------------------


def test_the_page_is_made_from_the_data():
    assert page.PAGE.read_text() == page.render(FOUND)


def test_the_template_holds_no_results():
    """Numbers with a decimal point come from the data, except predictions and parameters."""
    text = (REPO / "workshop/experiments/map/page.md.jinja").read_text()
    predicted = text.split("| predicted |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in predicted.splitlines() if line.startswith("| ")]
    allowed = {"0.5", *re.findall(r"\d*\.\d+", " ".join(cells))}
    outside = re.sub(r"\{\{.*?\}\}", "", text.replace(" ".join(cells), ""))
    assert {*re.findall(r"\d*\.\d+", outside)} <= allowed
    assert len(re.findall(r"words\.", text)) > 50


def test_the_page_is_not_written_against_the_data(tmp_path):
    """Each sentence names the verdicts for which it is true."""
    rows = dict(FOUND.rows)
    swapped = {name: {**row, "grpo": row["gdpo"]} for name, row in rows.items()}
    with pytest.raises(ValueError, match=r"two, 6:1: gdpo minus grpo; the data say"):
        page.render(replace(FOUND, rows=swapped))
    with pytest.raises(ValueError, match="'much more'"):
        page.Words(FOUND).gain("two, 6:1", "grpo", "much more")


def test_the_pictures_show_the_data(tmp_path):
    pictures.draw(FOUND, tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in pictures.PICTURES.iterdir()}
    assert {f"when_gdpo_helps/{name}" for name in drawn} == {
        *re.findall(r"\]\((when_gdpo_helps/[^)]+)\)", page.PAGE.read_text())
    }
    [axes] = pictures.answer(FOUND).axes
    for container, rival in zip(axes.containers, ("grpo", "grpo_range"), strict=True):
        shown = container.lines[0].get_xdata()
        assert shown == pytest.approx([FOUND.gain(name, rival).mean for name in pictures.ANSWER])
    for axes, rival in zip(pictures.heat_map(FOUND).axes, ("grpo", "grpo_range"), strict=True):
        cells = [float(text.get_text().replace("\N{MINUS SIGN}", "-")) for text in axes.texts]
        grid = [name for name in SETTINGS if name.startswith("format x 1, answer")]
        assert cells == pytest.approx([FOUND.gain(n, rival).mean for n in grid], abs=6e-4)
    for panel, name in zip(pictures.curves(FOUND), results.CURVES, strict=True):
        assert panel.lines[0].y == FOUND.curves[name, "gdpo", 1]


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_part_of_the_map_is_only_printed(capsys, monkeypatch):
    monkeypatch.setattr(results, "write", None)
    monkeypatch.setattr(page, "write", None)
    arguments = ["--settings", "two, 1:1", "--seeds", "4", "--processes", "1"]
    monkeypatch.setattr(sys, "argv", ["workshop.experiments.map", *arguments])
    command.main()
    printed = capsys.readouterr()
    [row] = [line for line in printed.out.splitlines() if line.startswith("| two, 1:1 |")]
    kept = FOUND.rows["two, 1:1"]["gdpo"].of_first
    assert float(row.split("|")[2]) == pytest.approx(kept, abs=0.01)
    assert "1/1 two, 1:1" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--settings", "two, 2:1"], "unknown settings: ['two, 2:1']; expected some of"),
        (["--seeds", "1"], "--seeds: expected 2 or more, got 1"),
        (["--page", "--seeds", "4"], "--page trains nothing"),
    ],
)
def test_a_wrong_argument(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["workshop.experiments.map", *arguments])
    with pytest.raises(SystemExit):
        command.main()
    assert message in capsys.readouterr().err


def test_pictures_and_page_from_the_data_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(pictures, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(sys, "argv", ["workshop.experiments.map", "--page"])
    command.main()
    assert (tmp_path / "page.md").read_text() == page.render(FOUND)
    assert len([*(tmp_path / "pictures").iterdir()]) == 3
