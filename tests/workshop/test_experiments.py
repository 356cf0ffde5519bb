"""The pages and pictures of the experiments are those of the committed results."""

import math
import re
import shlex
import sys
from statistics import fmean

import pytest
import torch
from pages import PAGES, cells_after
from quick_composition import compose_quickly as compose_config
from repository import REPO

from verl_gdpo.tools import advice as tools_advice
from workshop.experiments import __main__ as command
from workshop.experiments import advice, bandit, demonstration, weights
from workshop.experiments.bandit import simulate
from workshop.experiments.differences import Difference
from workshop.experiments.map import compare as map_compare
from workshop.experiments.map import pictures as map_pictures
from workshop.experiments.results import Trained
from workshop.experiments.trainer import compare, pictures

RESULTS = "workshop/experiments/RESULTS.md"

# --- the tables and pictures of the pages ---------------------------------------------------------


@pytest.mark.parametrize(
    ("edition", "gains", "matters"),
    [
        ("First edition", compare.bonferroni, compare.MATTERS),
        ("Second edition", compare.holm, compare.MATTERS_2),
    ],
)
def test_the_comparisons_of_an_edition(edition, gains, matters):
    rows = cells_after(RESULTS, "| setting | GDPO minus | rival | GDPO |", f"## {edition}")
    for row, ((setting, rival), gain) in zip(rows, gains().items(), strict=True):
        title, *numbers = row[:5]
        assert title.removesuffix(" (decides nothing)") == compare.SETTINGS[setting].title
        means = [f"{compare.mean_of(setting, arm):.3f}" for arm in (rival, "gdpo")]
        said = f"{gain.text()}; {compare.verdict(gain, matters)}"
        assert numbers == [compare.NAMES[rival], *means, said], (setting, rival)


def test_the_other_endpoints_of_the_first_edition():
    rows = cells_after(RESULTS, "| setting | GDPO minus | large reward |", "## First edition")
    for row, (setting, rival) in zip(rows, compare.COMPARISONS, strict=True):
        shown = []
        for name in ("large reward", "declared score"):
            endpoint = compare.endpoints(setting)[name]
            gain = compare.difference(setting, rival, endpoint)
            shown.append(gain.text() if endpoint else "not kept")
        assert row == [compare.SETTINGS[setting].title, compare.NAMES[rival], *shown]


# (setting, reward) of each row of the page
ONLY_GDPO_HELPS = (
    *(("sources", "narrow answer"), ("sources", "wide format")),
    *(("tests", "graded"), ("tests", "format")),
    *(("judge", "graded"), ("judge", "format")),
)
GDPO_HARMS = (
    *(("bonus", "answer"), ("length", "correct"), ("noise_3", "answer")),
    *(("failures_10", "answer"), ("exclude", "answer")),
)


def test_where_only_gdpo_helps_in_the_simulation():
    rows = cells_after(RESULTS, "| rewards | share of | GRPO |", "### Where only GDPO helps")
    for row, (setting, reward) in zip(rows, ONLY_GDPO_HELPS, strict=True):
        arms = ("grpo", "grpo_by_range", "gdpo")
        means = [bandit.mean(setting, reward, arm) for arm in arms]
        gains = [bandit.difference(setting, reward, arm).text(2) for arm in arms[:2]]
        assert row[2:] == [*means, *gains], (setting, reward)


def test_where_gdpo_harms_in_the_simulation():
    rows = cells_after(RESULTS, "| rewards | GRPO | GDPO |", "### Where GDPO harms")
    for row, (setting, reward) in zip(rows, GDPO_HARMS, strict=True):
        expected = [bandit.mean(setting, reward, arm) for arm in ("grpo", "gdpo")]
        expected.append(bandit.difference(setting, reward).text(2))
        for arm in ("gdpo_spreads", "gdpo_shares"):
            shown = "none found"
            if bandit.has(setting, arm):
                weights = bandit.weights(setting, arm)
                shown = f"{bandit.mean(setting, reward, arm)} ({weights})"
            expected.append(shown)
        assert row[1:] == expected, (setting, reward)


def test_the_spreads_lose_a_small_reward_that_is_wanted():
    tests, judge = (
        bandit.mean(setting, "format", "gdpo_spreads") for setting in ("tests", "judge")
    )
    said = f"format ends at\n{tests} beside the tests above, and at {judge} beside the judge."
    assert said in PAGES[RESULTS]


def test_what_the_tools_say_of_the_simulation():
    """`replay` and the report name four numbers of it."""
    arms = ("gdpo_spreads", "grpo", "gdpo_shares", "gdpo")
    means = [bandit.mean("bonus", "answer", arm) for arm in arms]
    assert re.findall(r"0\.\d\d", tools_advice.WEIGHTS) == means


def test_where_gdpo_harms_in_verls_trainer():
    rows = cells_after(RESULTS, "| setting | GRPO | GDPO |", "### Where GDPO harms")
    for row, (setting, gain) in zip(rows, demonstration.harms().items(), strict=True):
        grpo, gdpo, kept = (
            f"{demonstration.mean(setting, arm, 'answer'):.2f}"
            for arm in ("grpo", "gdpo", "gdpo_kept")
        )
        assert row == [f"`{setting}`", grpo, gdpo, gain.text(2), kept]


def arms_of(setting, reward):
    """Those that were run, in the order of the pages."""
    arms = ("grpo", "gdpo", "grpo_by_range")
    return [arm for arm in arms if (setting, arm, reward) in demonstration.curves()]


@pytest.mark.parametrize(
    ("setting", "header", "rewards"),
    [
        ("judge", "| seed | format, GRPO | GDPO |", {"format": ".2f", "judge": ".1f"}),
        (
            "model",
            "| seed | keyword, GRPO | GDPO |",
            {"keyword": ".2f", "words": ".2f", "ending": ".2f"},
        ),
        ("sentences", "| seed | words, GRPO | GDPO |", {"words": ".2f", "length": ".1f"}),
        (
            "sentences_prompts",
            "| seed, other prompts | words, GRPO | GDPO |",
            {"words": ".2f", "length": ".1f"},
        ),
    ],
)
def test_each_seed_of_the_demonstration(setting, header, rewards):
    shown = {}
    for seed, *numbers in cells_after(RESULTS, header, "## The demonstration"):
        shown[int(seed)] = numbers
    for seed, numbers in shown.items():
        for reward, form in rewards.items():
            for arm in arms_of(setting, reward):
                end = demonstration.ends(setting, arm, reward)[seed]
                assert numbers.pop(0) == format(end, form), (seed, reward, arm)
        assert numbers == []
    assert [*shown] == [*demonstration.ends(setting, "gdpo", reward)]


# (what is compared, reward, digits) of the rows of the users' page that are of the demonstration
SPEAKS_FOR = (
    *(("judge", "format", 2), ("judge", "judge", 1)),
    *(("sentences", "words", 2), ("sentences", "length", 1)),
)


def test_the_table_of_the_page_for_users():
    rows = cells_after("docs/evidence.md", "| rewards | runs | of |", "## What speaks for GDPO")
    shown = [[cells[1], *cells[3:]] for cells in rows]
    expected = []
    for setting, reward, digits in SPEAKS_FOR:
        gain = demonstration.difference(setting, reward)
        shown_by_range = "not run"
        if "grpo_by_range" in arms_of(setting, reward):
            over_by_range = demonstration.difference(setting, reward, over="grpo_by_range")
            shown_by_range = over_by_range.text(digits)
        expected.append([str(len(gain.values)), gain.text(digits), shown_by_range])
    gains = compare.bonferroni()
    for setting in ("20_to_1", "by_prompt"):
        over = [gains[setting, rival].text(2) for rival in compare.RIVALS]
        expected.append([str(len(compare.seeds_of(setting))), *over])
    assert shown == expected


@pytest.mark.parametrize(
    ("page", "setting", "reward"),
    [
        ("README.md", "judge", "format"),
        ("docs/evidence.md", "judge", "format"),
        ("docs/evidence.md", "sentences", "words"),
    ],
)
def test_in_how_many_runs_gdpo_gained(page, setting, reward):
    gain = demonstration.difference(setting, reward)
    above = sum(value > 0 for value in gain.values)
    text = " ".join(PAGES[page].split())
    assert f"{gain.text(2)}, in {above} of {len(gain.values)} runs" in text


def test_the_pictures_are_those_of_the_page(tmp_path, monkeypatch):
    for folder in ("map", "trainer"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(command, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["workshop.experiments"])
    command.main()
    linked = re.findall(r"\]\((\w+/[^)]+png)\)", PAGES[RESULTS])
    for folder in (tmp_path, (REPO / RESULTS).parent):
        drawn = {path.relative_to(folder).as_posix() for path in folder.glob("*/*.png")}
        assert {*linked} == drawn


@pytest.mark.parametrize("figure", ["first", "second"])
def test_the_marks_show_the_differences(figure):
    [axes] = getattr(pictures, figure)().axes
    marks = [bar.lines[0] for bar in axes.containers]
    gains = compare.bonferroni() if figure == "first" else compare.holm()
    filled = [mark for mark in marks if mark.get_markerfacecolor() != pictures.LOOK.background]
    shown = [float(mark.get_xdata()[0]) for mark in filled]
    assert shown == pytest.approx([gain.mean for gain in gains.values()])
    # four endpoints, of which two rows have no declared score; or two
    assert len(marks) == (4 * 7 - 2 if figure == "first" else 2 * 8)


def test_the_pictures_of_the_simulation_show_the_data():
    for axes, rival in zip(map_pictures.answer().axes, map_pictures.NAMES, strict=True):
        for container, optimizer in zip(axes.containers, map_compare.OPTIMIZERS, strict=True):
            gains = [map_compare.gain(optimizer, name, rival) for name in map_pictures.ANSWER]
            shown = container.lines[0].get_xdata()
            assert shown == pytest.approx([gain.mean for gain in gains])


@pytest.mark.slow
def test_the_coverage_of_the_intervals_is_measured():
    rows = [row for row in advice.rows() if row[0].startswith("held out")]
    assert len(rows) == len(advice.SIZES)
    lines = [f"| {what} | {numbers} |" for what, numbers in rows]
    assert "\n".join(lines) in PAGES[RESULTS]


@pytest.mark.slow
def test_weights_that_exist_are_found():
    of_dumps = list(weights.results())
    assert weights.table(of_dumps) in PAGES[RESULTS]
    assert not [one for one in of_dumps if one.exist and not one.by_tools]


def test_weights_of_a_few_dumps_are_found():
    of_dumps = list(weights.results(12))
    assert {one.exist for one in of_dumps} == {False, True}
    assert [one.by_tools for one in of_dumps] == [one.exist for one in of_dumps]
    assert len(weights.table(of_dumps).splitlines()) == 2 + len({of.rewards for of in of_dumps}) + 1


# --- the arithmetic -------------------------------------------------------------------------------


def test_an_interval_by_hand():
    """Deviations .1 and 0: variance .02 / 4 = .005; t(.975, 4) = 2.776, so 2.776 sqrt(.001)."""
    gain = Difference((0.1, 0.2, 0.3, 0.2, 0.2))
    assert (gain.mean, gain.spread) == pytest.approx((0.2, math.sqrt(0.005)))
    assert (gain.low, gain.high) == pytest.approx((0.2 - 0.0878, 0.2 + 0.0878), abs=1e-4)
    assert Difference(gain.values, compare.LEVEL).half_width > gain.half_width
    # t = .2 / (.0707 / sqrt(5)) = 6.32 with four degrees of freedom
    assert gain.p == pytest.approx(0.0032, abs=1e-4)
    assert gain.text(2) == "+0.20 [+0.11, +0.29]"
    assert Difference((0.001, -0.001)).text(2) == "0.00 [-0.01, +0.01]"


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ((0.1, 0.1, 0.11, 0.1, 0.1), "difference"),
        ((-0.1, -0.1, -0.11, -0.1, -0.1), "difference"),
        ((0.01, 0.01, 0.011, 0.01, 0.01), "difference, but none that matters"),
        ((-0.01, -0.01, -0.011, -0.01), "difference, but none that matters"),
        ((0.01, -0.01, 0.0, 0.01, 0.0), "no difference that matters"),
        ((0.1, -0.1, 0.0, 0.1, 0.0), "open"),
    ],
)
def test_a_verdict(values, verdict):
    assert compare.verdict(Difference(values), compare.MATTERS) == verdict


def test_the_same_training_is_no_difference():
    """Dividing by equal ranges changes nothing, so that arm was not trained a second time."""
    same = map_compare.gain("adam", "two, 1:1", "grpo", "grpo_range")
    assert same.values == (0.0,) * 8


def test_holm_tests_at_rising_levels():
    """The clear one at 1 - .05/3, which leaves 2 for the next, and no claim for those after it."""
    wide, near = (0.9, -0.7, 0.5, -0.2, 0.4), (0.01, -0.01, 0.0, 0.01, 0.0)
    clear = (0.3, 0.31, 0.3, 0.31, 0.3)
    levels = [g.level for g in compare.at_holms_levels([*map(Difference, (wide, clear, near))])]
    assert levels == pytest.approx([1 - 0.05 / 2, 1 - 0.05 / 3, 1 - 0.05 / 2])


def test_the_endpoints():
    """Shares .5 and .75 of the ranges 1 and 20: (.5 + 20 x .75) / 21."""
    result = Trained({"small": (0.25, 0.75), "large": (0.5, 1.0)}, {}, {}, (), 60.0)
    values = [endpoint(result) for endpoint in compare.endpoints("20_to_1").values()]
    assert values == pytest.approx([0.5, 0.75, 0.625, 15.5 / 21])
    assert compare.endpoints("by_prompt")["declared score"] is None


# --- the small simulation -------------------------------------------------------------------------


def test_the_small_simulation_is_made_again(monkeypatch):
    """Of one seed, the parameters of the policy are others, so the sign is compared."""
    monkeypatch.setattr(simulate, "S", 2)
    simulate.started.cache_clear()
    again = {}
    for row in simulate.rows("bonus"):
        again.setdefault(row["arm"], []).append(row["share"])
    committed = {arm: of for (name, _, arm), of in bandit.shares().items() if name == "bonus"}
    assert {*again} == {*committed} and {len(of) for of in committed.values()} == {24}
    for arm, shares in again.items():
        assert fmean(shares) == pytest.approx(fmean(committed[arm]), abs=0.15)


def test_the_signals_of_the_small_simulation_by_hand():
    """Format and thoughts in the first three places, the answer in the last ones; z is 1.3."""
    choices = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]])
    of = simulate.signals(choices[:, None, None], torch.full((3, 3, 1, 1), 1.3))
    for name, values in {
        **{"format": [1, 0, 1], "answer": [1, 1, 0], "correct": [1, 1, 0], "spoils": [0, 0, 1]},
        **{"other answer": [0, 0, 1], "thoughts": [1, 2 / 3, 1], "noise 0": [0.26] * 3},
        **{"succeeds in 90 %": [0] * 3, "succeeds in 98 %": [1] * 3},
    }.items():
        assert of[name].flatten().tolist() == pytest.approx(values), name
    # prompt 0 has the narrow source and 2 tests, prompt 15 the wide one and 50
    assert of["by source"][0, 0, [0, 15]].tolist() == pytest.approx([1 / 6, 1])
    assert (50 * of["tests passed of 50"][0, 0, [0, 15]]).tolist() == pytest.approx([2, 50])
    assert of["judge of 60 to 80"][0, 0, [0, 15]].tolist() == pytest.approx([0.713, 0.813])
    assert of["narrow answer"][0, 0, 15].isnan() and of["wide format"][0, 0, 0].isnan()


def test_a_policy_earns_what_it_samples(monkeypatch):
    monkeypatch.setattr(simulate, "S", 2)
    simulate.started.cache_clear()
    policy = simulate.started(False)
    sampled = simulate.signals(policy.choices().sample((4000,)), torch.zeros(3, 1, 1, 1))
    for name, share_S in zip(
        ("format", "graded"), policy.earns(("format", "graded")).T, strict=True
    ):
        means = sampled[name].mean((0, 2)).tolist()  # of 64,000: errors .0013 and .0012
        assert share_S.tolist() == pytest.approx(means, abs=0.008)


# --- GPUs -----------------------------------------------------------------------------------------


def test_the_commands_of_gpus():
    [loop] = re.findall(r"^for seed in .*?^done", PAGES[RESULTS], re.M | re.S)
    lines = loop.replace("\\\n", " ").replace("$seed", "3").splitlines()[1:-1]
    configs = {}
    for script, *keys in map(shlex.split, lines):
        assert script == "./run_tool_rl.sh"
        config = compose_config(REPO / "recipes", "train", ["task=tool_rl", *keys])
        configs[config.run_dir] = config
        assert config.actor_rollout_ref.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
        assert config.trainer.n_gpus_per_node == 8
        assert (config.seed, config.trainer.save_freq) == (3, -1)
    arms = {
        folder: (config.algorithm.adv_estimator, config.algorithm.gdpo.get("rewards"))
        for folder, config in configs.items()
    }
    rescaled = {"format": 1.0, "correctness": 1 / 6}  # divided by the ranges 1 and 6
    assert arms == {
        **{"runs/gdpo-3": ("gdpo", None), "runs/grpo-3": ("grpo", None)},
        "runs/rescaled-3": ("grpo", rescaled),
    }
