"""The pages and pictures of the experiments are those of the committed results."""

import math
import re
import shlex
import sys
from statistics import fmean, stdev

import pytest
import torch
from pages import PAGES
from quick_composition import compose_quickly as compose_config
from repository import REPO
from scipy import stats

from workshop.experiments import __main__ as command
from workshop.experiments import advice, bandit
from workshop.experiments.bandit import simulate
from workshop.experiments.differences import Difference, seeds_needed
from workshop.experiments.map import compare as map_compare
from workshop.experiments.map import page as map_page
from workshop.experiments.map import pictures as map_pictures
from workshop.experiments.results import Run, Trained
from workshop.experiments.trainer import compare, page, pictures

# --- the pages, their pictures and the sentences of others ----------------------------------------


@pytest.mark.parametrize("file", ["when_gdpo_helps.md", "evidence.md"])
def test_a_page_is_made_from_the_data(file):
    assert (REPO / "docs" / file).read_text() == command.page(file)


def test_the_pictures_are_those_of_the_page(tmp_path, monkeypatch):
    (tmp_path / "evidence").mkdir()
    monkeypatch.setattr(command, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["workshop.experiments"])
    command.main()
    linked = re.findall(r"\]\(evidence/([^)]+png)\)", (tmp_path / "evidence.md").read_text())
    for folder in (tmp_path / "evidence", REPO / "docs/evidence"):
        assert {*linked} == {path.name for path in folder.glob("*.png")}


def test_every_setting_of_the_map_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["workshop.experiments", "--settings"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * 76 and any(
        line.startswith("two, 20:1 | grpo | +0.068") for line in lines
    )


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


# levels, margins, parameters, ranges, and what others report
ALLOWED = {
    "evidence.md": "0.05 0.02 0.001 0.7 0.8 0.3 0.5 1.5 2.5 2601.05242",
    "when_gdpo_helps.md": "0.05 0.02 0.1 1.0 0.0508",
}


@pytest.mark.parametrize("file", ALLOWED)
def test_a_template_holds_no_results(file):
    """Numbers with a decimal point come from the data, except those, and what the paper reports."""
    text = (REPO / f"workshop/experiments/{file}.jinja").read_text()
    text = re.sub(r"^arXiv 2601.*$", "", text, flags=re.M)
    outside = re.sub(r"```.*?```|\{[{%].*?[%}]\}", "", text, flags=re.S)
    quoted = re.findall(r'^  \("(.*?)",', text, re.M)  # of the lines of a table
    numbers = re.findall(r"\d*\.\d+", "\n".join([outside, *quoted]))
    assert {*numbers} <= {*ALLOWED[file].split()}


@pytest.mark.slow
def test_the_coverage_in_the_page_of_the_advice_is_measured():
    rows = [row for row in advice.rows() if row[0].startswith("held out")]
    assert len(rows) == len(advice.SIZES)
    lines = [f"| {what} | {numbers} |" for what, numbers in rows]
    assert "\n".join(lines) in PAGES["docs/advice.md"]


# --- a sentence that the data contradict is not written -------------------------------------------


def test_the_page_of_the_simulation_is_not_written_against_the_data():
    assert map_page.text("two, 20:1", "grpo", "more").startswith("+0.068 [")
    with pytest.raises(ValueError, match=r"two, 20:1: gdpo minus grpo; the data say 'more'"):
        map_page.text("two, 20:1", "grpo", "less")
    with pytest.raises(ValueError, match="'much more'"):
        map_page.text("two, 20:1", "grpo", "much more")


def test_the_page_of_the_trainer_is_not_written_against_the_data():
    with pytest.raises(ValueError, match="says 'open' of 20_to_1, grpo: it is 'difference'"):
        page.checked("20_to_1", "grpo", "open")


def test_an_expectation_counts_with_its_whole_interval(monkeypatch):
    for bounds, shown in {  # +0.24 to +0.44
        (0.5, 1): "+0.5 or more | **missed**",
        (0.3, 1): "+0.3 or more | open",
        (0.2, 0.5): "+0.2 to +0.5 | as expected",
        (-0.5, 0.5): "within 0.5 | as expected",
    }.items():
        monkeypatch.setitem(compare.EXPECTED, ("20_to_1", "grpo"), bounds)
        assert page.held("20_to_1", "grpo") == shown
    assert page.held("tool_rl", "grpo") == "nothing | "


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
    ("values", "in_trainer", "in_simulation"),
    [
        ((0.1, 0.1, 0.11, 0.1, 0.1), "difference", "more"),
        ((-0.1, -0.1, -0.11, -0.1, -0.1), "difference", "less"),
        ((0.01, 0.01, 0.011, 0.01, 0.01), "difference, but none that matters", "a little more"),
        ((-0.01, -0.01, -0.011, -0.01), "difference, but none that matters", "a little less"),
        ((0.01, -0.01, 0.0, 0.01, 0.0), "no difference that matters", "no difference"),
        ((0.1, -0.1, 0.0, 0.1, 0.0), "open", "open"),
    ],
)
def test_a_verdict(values, in_trainer, in_simulation):
    assert compare.verdict(Difference(values), compare.MATTERS) == in_trainer
    assert map_compare.verdict(Difference(values)) == in_simulation


def test_the_same_training_is_no_difference():
    """Dividing by equal ranges changes nothing, so that arm was not trained a second time."""
    same = map_compare.gain("adam", "two, 1:1", "grpo", "grpo_range")
    assert same.values == (0.0,) * 8 and map_compare.verdict(same) == "no difference"
    assert map_page.of_one(same) == "0, the same"


def test_two_optimisers_that_disagree_are_open(monkeypatch):
    for verdicts, both in (
        (("more", "a little more"), "a little more"),
        (("less", "less"), "less"),
        (("more", "less"), "open"),
        (("no difference", "no difference"), "no difference"),
    ):
        said = iter(verdicts)
        monkeypatch.setattr(map_compare, "verdict", lambda one, said=said: next(said))
        assert map_compare.joint("two, 1:1") == both


def test_holm_tests_at_rising_levels():
    """The clear one at 1 - .05/3, which leaves 2 for the next, and no claim for those after it."""
    wide, near = (0.9, -0.7, 0.5, -0.2, 0.4), (0.01, -0.01, 0.0, 0.01, 0.0)
    clear = (0.3, 0.31, 0.3, 0.31, 0.3)
    levels = [g.level for g in compare.at_holms_levels([*map(Difference, (wide, clear, near))])]
    assert levels == pytest.approx([1 - 0.05 / 2, 1 - 0.05 / 3, 1 - 0.05 / 2])


def test_the_new_seeds_are_tested_alone():
    gain, seeds = page.tested("gsm8k_again", "grpo_rescaled")[0], compare.seeds_of("gsm8k_again")
    assert (seeds, len(gain.values), gain.level) == ([*range(6, 14)], 8, 0.95)


def test_the_seeds_that_an_effect_needs():
    """s = d: at n = 10, (2.262 + 0.883)^2 = 9.9 <= 10; at n = 9, (2.306 + 0.889)^2 = 10.2 > 9."""
    assert seeds_needed(0.1, 0.1) == 10
    # large n: (1.96 + 0.842)^2 x 100 = 785, and a few more for t
    assert 785 <= seeds_needed(0.01, 0.1) <= 790


def test_the_endpoints():
    """Shares .5 and .75 of the ranges 1 and 20: (.5 + 20 x .75) / 21."""
    result = Trained({"small": (0.25, 0.75), "large": (0.5, 1.0)}, {}, {}, (), 60.0)
    values = [endpoint(result) for endpoint in compare.endpoints("20_to_1").values()]
    assert values == pytest.approx([0.5, 0.75, 0.625, 15.5 / 21])
    assert compare.endpoints("by_prompt")["declared score"] is None
    names = ["format", "correctness", "mean of all", "declared score"]
    assert [*compare.endpoints_2("tool_rl_seeds")] == names
    assert "declared score" not in compare.endpoints_2("maths")


def test_the_long_training_has_means_of_ten_steps(monkeypatch):
    curve = tuple(step / 120 for step in range(1, 121))
    shares = {"small": curve, "large": (1.0,) * 120}
    run = Run(page.LONG, "gdpo", 1)
    monkeypatch.setattr(page, "read_all", lambda: {run: Trained(shares, {}, {}, (), 0.0)})
    means = (25.5, 55.5, 85.5, 115.5)  # of the steps 21 to 30, ..., 111 to 120
    assert page.at_ends("gdpo", 1) == pytest.approx([step / 120 for step in means])


def test_the_interval_of_five_runs_each():
    one, other = (37, 43, 34, 31, 31), (18, 19, 75, 16, 65)
    got = page.welch(*((fmean(of), stdev(of)) for of in (one, other)))
    interval = stats.ttest_ind(one, other, equal_var=False).confidence_interval(0.95)
    assert got == pytest.approx((35.2 - 38.6, interval.low, interval.high))


def test_why_two_settings_decide_nothing():
    """2 of 16: the mean is 1/8, the squares are 2 x 49/64 + 14/64 = 7/4, and s^2 = 7/60."""
    assert page.tie(1, 1) == 0
    assert page.tie(0.346, 0.355) == pytest.approx(7 / 8 / math.sqrt(7 / 60), rel=1e-3)
    assert page.steps_alike("maths_if_correct") == [25, 25, 12, 2, 12]


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
    [loop] = re.findall(r"^for seed in .*?^done", PAGES["docs/evidence.md"], re.M | re.S)
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
