"""The pictures: what is drawn, that it is told apart in grey, and the pictures of docs/."""

import importlib.util
import itertools
import math
import re
import shutil
import sys
from html import unescape

import pytest
import torch
from oracle import gdpo
from repository import REPO, tracked_files
from run_folder_writer import make_run
from verl_gdpo.tools.plots import DARK, LIGHT, MARKERS, STYLES, THEMES, Line, Panel, figure_of
from verl_gdpo.tools.report.sections import arm_lines, looks, one_of

from verl_gdpo.run.folder import read_config, training_rewards
from verl_gdpo.tools import summary
from verl_gdpo.tools.report.charts import REWARD_LOOKS, chart_of_each_reward, reward_panels
from verl_gdpo.tools.report.runs import Run, RunsOfArm, bounds_of_run, read_arms

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def lightness(colour):
    """CIE L*, 0 to 100: what is left of a colour in grey."""
    Y = luminance(colour)
    return 116 * Y ** (1 / 3) - 16 if Y > 0.008856 else 903.3 * Y


def contrast(one, other):
    """WCAG 2: 4.5 is asked of text, 3 of graphics."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.fixture
def make_figures(monkeypatch):
    monkeypatch.syspath_prepend(REPO / "docs")
    spec = importlib.util.spec_from_file_location("make_figures", REPO / "docs/make_figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def axes_of(panel, theme="light"):
    figure = figure_of([panel], THEMES[theme])
    figure.draw_without_rendering()
    return figure.axes[0]


def test_looks_are_told_apart_in_grey_and_seen_in_both_themes():
    assert STYLES[0] == "-" and "-" not in STYLES[1:]
    for of_looks in (LIGHT, DARK, STYLES, MARKERS):
        assert len(set(of_looks)) == len(LIGHT)
    for theme in THEMES.values():
        assert contrast(theme.ink, theme.background) >= 4.5
        assert all(contrast(colour, theme.background) >= 3 for colour in theme.colours)
        greys = [lightness(colour) for colour in theme.colours]
        assert min(abs(a - b) for a, b in itertools.combinations(greys, 2)) >= 10
        assert abs(greys[0] - greys[1]) >= 30  # gdpo and grpo
        assert abs(greys[REWARD_LOOKS[0]] - greys[REWARD_LOOKS[1]]) >= 30


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gdpo", "grpo"], [0, 1]),
        (["grpo", "gdpo", "grpo_no_std"], [1, 0, 2]),
        (["grpo", "grpo_no_std"], [0, 1]),
        (["my_run"], [0]),
    ],
)
def test_the_main_arm_is_the_solid_line(names, expected):
    arms = [RunsOfArm(name, [Run(name, {1: {"gdpo/a/mean": 0.0}})]) for name in names]
    assert looks(arms) == expected
    lines = arm_lines(arms, one_of(training_rewards, "a"))
    assert [line.look for line in lines] == expected
    [reward] = reward_panels(arms).values()
    assert [line.look for line in reward.lines] == expected
    drawn = axes_of(Panel("t", "x", "y", lines)).get_lines()
    styles = {line.get_label(): line.get_linestyle() for line in drawn}
    assert [name for name in names if styles[name] == "-"] == [names[expected.index(0)]]


def shares_of(*runs):
    """An arm of runs with {step: (share of a, share of b)}; None where a step does not log it."""
    members = [
        {
            step: {f"gdpo/{k}/share": v for k, v in zip("ab", pair, strict=True) if v is not None}
            for step, pair in run.items()
        }
        for run in runs
    ]
    return RunsOfArm("gdpo", [Run(f"run{i}", metrics) for i, metrics in enumerate(members)])


def share_chart(arm):
    return next(iter(chart_of_each_reward(arm, "share")), None)


def test_the_share_of_each_reward_is_a_smoothed_line():
    chart = share_chart(shares_of({step: (step / 10, 1 - step / 10) for step in range(1, 9)}))
    a, b = chart.panel.lines
    # the mean of steps 4 to 8 is 6/10
    assert a.y[-1] == pytest.approx(0.6) and b.y[-1] == pytest.approx(0.4)
    assert chart.panel.title == "gdpo: share of each reward in the advantage, mean of 5 steps"
    assert "at the end: a 0.10 to 0.60, b 0.90 to 0.40." in chart.caption
    assert share_chart(RunsOfArm("gdpo", [Run("run", {1: {"gdpo/a/mean": 1.0}})])) is None


def test_a_share_that_is_no_number_is_a_gap():
    chart = share_chart(shares_of({1: (1.0, None), 2: (0.5, 0.5), 3: (math.nan, 0.5)}))
    a, b = chart.panel.lines
    assert a.y[:2] == [1.0, 0.75] and math.isnan(a.y[2])
    assert (b.x, b.y) == ([2, 3], [0.5, 0.5])


def test_shares_have_the_axis_of_all_shares():
    low, high = axes_of(share_chart(shares_of({1: (0.01, 0.99), 2: (0.04, 0.96)})).panel).get_ylim()
    assert -0.05 < low < 0 and 1 < high < 1.1
    low, high = axes_of(share_chart(shares_of({1: (-0.34, 1.34)})).panel).get_ylim()
    assert low < -0.34 and high > 1.34


def test_more_rewards_than_colours_are_told_apart_without_colour():
    run = Run("run", {step: {f"gdpo/r{i}/share": 0.1 for i in range(9)} for step in (1, 2)})
    axes = axes_of(share_chart(RunsOfArm("gdpo", [run])).panel)
    drawn = [line for line in axes.get_lines() if line.get_label().startswith("r")]
    looks = {(line.get_linestyle(), str(line._dash_pattern), line.get_marker()) for line in drawn}
    assert len(drawn) == len(looks) == 9


def with_bounds(run, source="made", rewards="null"):
    config = run / "hydra" / ".hydra" / "config.yaml"
    config.write_text(config.read_text().replace("rewards: null", f"rewards: {rewards}"))
    for dump in (run / "rollouts").iterdir():
        dump.write_text(dump.read_text().replace('"made"', f'"{source}"'))
    return run


def bounds_drawn(*folders):
    arms = read_arms(folders)
    panels = reward_panels(arms)
    return {name: panel.bounds for name, panel in panels.items()}


def test_bounds_are_those_that_scorers_or_the_configuration_declare(tmp_path):
    plain = make_run(tmp_path / "plain", steps=2)
    assert bounds_drawn(plain) == {"correctness": None, "format": None}
    ours = with_bounds(make_run(tmp_path / "ours", steps=2), source="rlla")
    assert bounds_drawn(ours) == {"correctness": (-3, 3), "format": (0, 1)}
    one = "{format: {weight: 1, bounds: [0, 2]}, correctness: 1}"
    configured = with_bounds(make_run(tmp_path / "configured", steps=2), rewards=one)
    assert bounds_drawn(configured) == {"correctness": None, "format": (0, 2)}
    # a condition makes it 0 where it is not met
    gated = (
        "{format: {weight: 1, bounds: [1, 2], when: {reward: correctness, at_least: 1}}, "
        "correctness: 1}"
    )
    conditional = with_bounds(make_run(tmp_path / "conditional", steps=2), rewards=gated)
    assert bounds_drawn(conditional)["format"] == (0, 2)
    # runs that differ: nothing is true of all lines
    assert bounds_drawn(ours, configured) == {"correctness": None, "format": None}
    refused = with_bounds(make_run(tmp_path / "refused", steps=2), rewards="{format: many}")
    assert bounds_drawn(refused) == {"correctness": None, "format": None}


def test_bounds_of_each_data_source(tmp_path):
    run = with_bounds(make_run(tmp_path / "run", steps=2), source="rlla")
    (dump,) = (run / "rollouts").iterdir()
    dump.write_text(dump.read_text().replace('"rlla"', '"verl_gdpo/gsm8k"', 3))
    found = bounds_of_run(run, read_config(run))
    # `format_reward` and the like are verl's names for the same
    assert {name: pair for name, pair in found.items() if "_reward" not in name} == {
        "format": (0, 1),  # on which both agree, but not on correctness
        "integer": (0, 1),
        "correctness (rlla)": (-3, 3),
        "format (rlla)": (0, 1),
        **{f"{n} (verl_gdpo/gsm8k)": (0, 1) for n in ("format", "correctness", "integer")},
    }


def test_bounds_follow_the_options_of_the_scorer(tmp_path):
    run = with_bounds(make_run(tmp_path / "run", steps=2), source="rlla")
    config = run / "hydra" / ".hydra" / "config.yaml"
    text = config.read_text()
    expected = {"max_correctness: 1": (-1, 1), "granularity: unheard_of": None}
    for option, correctness in expected.items():
        config.write_text(text.replace("reward:\n", f"reward:\n  reward_kwargs: {{{option}}}\n"))
        assert bounds_drawn(run)["correctness"] == correctness


def test_bounds_are_thin_lines_with_their_names():
    line = Line("gdpo", [1, 2], [-1.0, 2.0])
    axes = axes_of(Panel("t", "x", "y", [line], bounds=(-3, 3)))
    levels = {drawn.get_ydata()[0]: drawn for drawn in axes.get_lines() if len(drawn.get_xdata())}
    assert {-3, 3} <= {*levels} and levels[3].get_linewidth() < 1
    names = [text.get_text() for text in axes.texts]
    assert names == ["lowest possible: \N{MINUS SIGN}3", "highest possible: 3"]
    low, high = axes.get_ylim()
    assert low < -3 and high > 3
    assert not axes_of(Panel("t", "x", "y", [line])).texts


def test_titles_say_what_is_seen_and_no_time(tmp_path, monkeypatch):
    run = make_run(tmp_path / "tool_rl-2026-11-21_14-46-30", arm="grpo", steps=6)
    titles = []
    monkeypatch.setattr(
        "verl_gdpo.tools.plots.draw",
        lambda panels, target, title: titles.extend([title, *(p.title for p in panels)]),
    )
    assert summary.main([str(run)]) == 0
    assert titles == [
        "Rewards over 6 training steps of grpo",
        "correctness, mean of 5 steps",
        "format, mean of 5 steps",
    ]
    titles.clear()
    (run / "hydra/.hydra/config.yaml").unlink()
    assert summary.main([str(run)]) == 0
    assert titles[0] == "Rewards over 6 training steps"


def test_a_long_title_is_broken_into_lines():
    arm = RunsOfArm("a_rather_long_name_of_an_arm", shares_of({1: (0.5, 0.5)}).runs)
    figure = figure_of([share_chart(arm).panel], THEMES["light"])
    figure.draw_without_rendering()
    [axes] = figure.axes
    title = axes._left_title
    assert title.get_window_extent().x1 <= figure.bbox.x1
    assert title.get_text().count("\n") == 2


def test_the_idea_is_drawn_with_the_advantages_of_the_estimators(make_figures):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    rewards, groups = [(0, 0), (0, 1), (0, 0), (1, 1)], ["a", "a", "b", "b"]
    totals = torch.tensor([[float(sum(row))] for row in rewards])
    grpo, _ = compute_grpo_outcome_advantage(totals, torch.ones(4, 1), groups)
    left, right = make_figures.idea().axes
    heights = {axes: [bar.get_height() for bar in axes.patches] for axes in (left, right)}
    assert heights[left] == pytest.approx(grpo[:, 0].tolist(), abs=1e-6)
    assert heights[left] == pytest.approx([-0.7071, 0.7071] * 2, abs=1e-4)
    # S = -.7071, .7071, -1.4142, 1.4142 has the standard deviation 1.2910
    assert heights[right] == pytest.approx([-0.5477, 0.5477, -1.0954, 1.0954], abs=1e-4)
    assert heights[right] == pytest.approx(gdpo(rewards, groups), abs=1e-6)
    assert left.get_title() == "GRPO: a and b look the same"
    assert right.get_title() == "GDPO: b counts 2 times as much"
    assert [tick.get_text() for tick in left.get_xticklabels()] == [str(row) for row in rewards]
    labels = [text.get_text().replace("\N{MINUS SIGN}", "-") for text in right.texts]
    for label in ("-0.55", "+0.55", "-1.10", "+1.10"):
        assert label in labels
    colours = ["#{:02x}{:02x}{:02x}".format(*(round(255 * c) for c in axes.patches[0].get_facecolor()[:3])) for axes in (left, right)]  # fmt: skip  # noqa: E501
    assert abs(lightness(colours[0]) - lightness(colours[1])) >= 30


# without std only the differences of the sums count: multisets of G sums from 0 to n with least
# sum 0 are C(n+G-1, G-1). With std and n=2, C(G,2)+1. GDPO's are from an independent count.
@pytest.mark.parametrize(
    ("estimator", "over_rollouts", "over_rewards"),
    [
        ("GRPO", [2, 4, 7, 11, 16, 22, 29, 37, 46, 56], [7, 14, 23, 41]),
        ("GRPO w/o std", [3, 6, 10, 15, 21, 28, 36, 45, 55, 66], [10, 20, 35, 56]),
        ("GDPO", [3, 6, 14, 26, 38, 59, 81, 109, 145, 186], [14, 45, 127, 318]),
    ],
)
def test_distinct_groups(make_figures, estimator, over_rollouts, over_rewards):
    distinct_groups = make_figures.collapse.distinct_groups
    assert [distinct_groups(estimator, g, 2) for g in range(2, 12)] == over_rollouts
    assert [distinct_groups(estimator, 4, n) for n in range(2, 6)] == over_rewards


PICTURES = {path.name for path in tracked_files() if path.suffix in (".png", ".svg")}
PICTURES &= {path.name for path in (REPO / "docs").iterdir()}


def test_the_pictures_of_docs_are_small_and_shown():
    assert {"report.png", "replay.svg", "idea.png"} <= PICTURES
    pages = [REPO / path for path in tracked_files() if path.suffix == ".md"]
    shown = {
        name.rpartition("/")[2]
        for page in pages
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())
    }
    assert shown >= PICTURES
    assert {name for name in PICTURES if (REPO / "docs" / name).stat().st_size > 150_000} == set()


def test_the_runs_of_the_pictures_are_described(make_figures):
    described = " ".join(make_figures.__doc__.split())
    text = (REPO / "docs/tools.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)\n```", text, re.DOTALL)
    [*runs, draw] = next(block for block in blocks if "make_figures" in block).splitlines()
    assert len(runs) == 2 and all(f"`{run}`" in described for run in runs)
    folders = [re.search(r"run_dir=(\S+)", run)[1] for run in runs]
    assert draw == " ".join(["python docs/make_figures.py", *folders])


def test_the_picture_of_a_terminal_needs_no_font_and_holds_the_text():
    picture = (REPO / "docs/replay.svg").read_text()
    text = unescape(re.sub(r"<[^>]+>", "\n", picture)).replace("\N{NO-BREAK SPACE}", " ")
    assert "http" not in picture.replace('xmlns="http://www.w3.org/2000/svg"', "").replace(
        "<!-- Generated with Rich https://www.textualize.io -->", ""
    )
    for line in ("Where logged and grpo differ most:", "$ verl-gdpo replay runs/gdpo --arm grpo"):
        assert line in text
    assert "The run's settings reproduce the logged advantages" in text


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser for report.png")
@pytest.mark.slow
def test_the_command_draws_the_pictures_of_docs(make_figures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_figures, "DOCS", tmp_path)
    runs = [make_run(tmp_path / "runs" / arm, arm, steps=6) for arm in ("gdpo", "grpo")]
    monkeypatch.setattr(sys, "argv", ["make_figures.py", *map(str, runs)])
    make_figures.main()
    drawn = {path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".svg")}
    assert drawn == PICTURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    assert "differ&#160;most" in (tmp_path / "replay.svg").read_text()
    with pytest.raises(ValueError, match=r"expected runs of gdpo and of grpo, got \['grpo', 'gd"):
        make_figures.draw_runs(*reversed(runs))
    monkeypatch.setattr(sys, "argv", ["make_figures.py", str(runs[0])])
    with pytest.raises(SystemExit):
        make_figures.main()
    assert "expected no run, or GDPO_RUN and GRPO_RUN" in capsys.readouterr().err
