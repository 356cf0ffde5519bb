"""The pictures of docs/: what is drawn, and that they are small, shown and made by a command."""

import itertools
import json
import re
import sys

import pytest
import torch
from colours import contrast, lightness
from matplotlib.colors import to_hex
from of_machine import browser
from oracle import gdpo
from PIL import Image
from repository import REPO, tracked_files
from run_folder_writer import make_run, write_metrics

from verl_gdpo.tools.report.colours import OF_ESTIMATOR, ON_WHITE
from verl_gdpo.tools.report.page import build_page
from workshop.figures import __main__ as make_figures
from workshop.figures import demonstration, screens
from workshop.figures.collapse import distinct_groups
from workshop.looks import LOOK, colours_of


def test_the_colours_are_told_apart_in_grey():
    greys = [lightness(colour) for colour in LOOK.colours]
    assert min(abs(a - b) for a, b in itertools.combinations(greys, 2)) >= 10
    assert abs(greys[0] - greys[1]) >= 30  # gdpo and grpo
    assert all(contrast(colour, LOOK.background) >= 3 for colour in LOOK.colours)
    assert contrast(LOOK.ink, LOOK.background) >= 4.5


def test_an_estimator_has_the_colour_that_it_has_in_the_report():
    assert colours_of(["grpo", "gdpo", "grpo_by_range"]) == {
        "gdpo": ON_WHITE[OF_ESTIMATOR["gdpo"]],
        "grpo": ON_WHITE[OF_ESTIMATOR["grpo"]],
        "grpo_by_range": "#A01E71",
    }
    left, right = make_figures.idea().axes
    bars = [to_hex(axes.patches[0].get_facecolor()).upper() for axes in (left, right)]
    assert bars == [*colours_of(["GRPO", "GDPO"]).values()]
    lines = demonstration.demonstration("judge").axes[0].get_lines()
    assert {line.get_color() for line in lines} == {*colours_of(["gdpo", "grpo"]).values()}


@pytest.mark.parametrize("setting", demonstration.PANELS)
def test_each_panel_of_the_demonstration_says_what_it_shows_and_names_its_lines(setting):
    figure = demonstration.demonstration(setting)
    for axes, reward in zip(figure.axes, demonstration.PANELS[setting], strict=True):
        assert axes.get_title(loc="left").count(":") == 1
        named = [text.get_text().strip() for text in axes.texts]
        means = {}
        for arm, name in demonstration.ARMS[setting].items():
            form = demonstration.PANELS[setting][reward][3]
            means[f"{name} {demonstration.mean(setting, arm, reward):{form}}"] = arm
        assert {*named} == {*means}
    assert "mean of the last 5" in figure.get_supxlabel()


def test_the_idea_is_drawn_with_the_advantages_of_the_estimators():
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
    colours = [to_hex(axes.patches[0].get_facecolor()) for axes in (left, right)]
    assert abs(lightness(colours[0]) - lightness(colours[1])) >= 30


# without std only the differences of the sums count: multisets of G sums from 0 to n with least
# sum 0 are C(n+G-1, G-1). With std and n=2, C(G,2)+1. GDPO's are from an independent count.
@pytest.mark.parametrize(
    ("estimator", "over_samples", "over_rewards"),
    [
        ("GRPO", [2, 4, 7, 11, 16, 22, 29, 37, 46, 56], [7, 14, 23, 41]),
        ("GRPO w/o std", [3, 6, 10, 15, 21, 28, 36, 45, 55, 66], [10, 20, 35, 56]),
        ("GDPO", [3, 6, 14, 26, 38, 59, 81, 109, 145, 186], [14, 45, 127, 318]),
    ],
)
def test_distinct_groups(estimator, over_samples, over_rewards):
    assert [distinct_groups(estimator, g, 2) for g in range(2, 12)] == over_samples
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


def test_the_picture_of_the_report_shows_what_todays_report_shows(tmp_path):
    """Of a run with the metrics of the picture's."""
    with Image.open(REPO / "docs" / "report.png") as picture:
        kept = json.loads(picture.info[screens.NOTE])
    lines = []
    for step in range(1, 4):
        lines.append({"step": step, "data": dict.fromkeys(kept["metrics"], float(step))})
    write_metrics(tmp_path / "run", lines)
    assert screens.first_screen(build_page([tmp_path / "run"])) == kept


@pytest.mark.slow
def test_the_command_draws_the_pictures_of_docs(tmp_path, monkeypatch):
    browser()
    monkeypatch.setattr(make_figures, "DOCS", tmp_path)
    runs = [make_run(tmp_path / "runs" / arm, arm, steps=6) for arm in ("gdpo", "grpo")]
    monkeypatch.setattr(sys, "argv", ["workshop.figures", *map(str, runs)])
    make_figures.main()
    drawn = {path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".svg")}
    assert drawn == PICTURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    terminal = (tmp_path / "replay.svg").read_text()
    assert "differ&#160;most" in terminal and "@font-face" not in terminal
