"""The charts of the report: which there are, what is kept of long lines, and the vendored uPlot."""

import hashlib
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from colours import contrast, lightness
from hypothesis import example, given
from hypothesis import strategies as st
from made_arms import made_arm
from omegaconf import OmegaConf
from repository import REPO

from verl_gdpo.tools.report.charts import (
    OF_TRAINING,
    Chart,
    as_data,
    chart_of,
    lines_of,
    looks_of_arms,
    sections,
    thinned,
)
from verl_gdpo.tools.report.colours import OF_ESTIMATOR, ON_BLACK, ON_WHITE, free_look, looks_of
from verl_gdpo.tools.report.runs import Run, RunsOfArm
from verl_gdpo.tools.run_folder.findings import Finding

FOLDER = REPO / "verl_gdpo/tools/report"


def themes():
    """The variables of the page's colours, light and dark."""
    text = (FOLDER / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", text, re.S)
    found = [dict(re.findall(r"--([\w-]+): (#\w{6})", theme)) for theme in (light, dark)]
    assert found[0].keys() == found[1].keys()
    for theme, colours in zip(found, (ON_WHITE, ON_BLACK), strict=True):
        theme |= {f"look-{number}": colour for number, colour in enumerate(colours)}
    return found


@pytest.mark.parametrize("theme", themes(), ids=["light", "dark"])
def test_looks_are_told_apart_in_grey_and_seen_in_both_themes(theme):
    colours = [theme[f"look-{number}"] for number in range(6)]
    for text in ("ink", "soft", "link", "bad", "good"):
        assert contrast(theme[text], theme["card"]) >= 4.5
        assert contrast(theme[text], theme["page"]) >= 4.5
    assert all(contrast(colour, theme["card"]) >= 3 for colour in colours)
    greys = [lightness(colour) for colour in colours]
    assert min(abs(a - b) for a, b in itertools.combinations(greys, 2)) >= 10
    assert abs(greys[0] - greys[1]) >= 30  # gdpo and grpo
    assert abs(greys[free_look(0)] - greys[free_look(1)]) >= 30


def test_a_look_that_comes_again_has_other_dashes():
    script = (FOLDER / "page.js").read_text()
    dashes = json.loads(re.search(r"DASHES = (.*);", script)[1])
    assert len({json.dumps(one) for one in dashes}) == 6 and dashes[0] == []
    assert "DASHES[(look + Math.floor(look / 6)) % 6]" in script


def test_an_estimator_has_one_colour_in_whatever_order_the_arms_come():
    # those of the pictures in README.md
    assert (ON_WHITE[OF_ESTIMATOR["gdpo"]], ON_WHITE[OF_ESTIMATOR["grpo"]]) == (
        "#003C65",
        "#E27101",
    )
    for order in itertools.permutations(["gdpo", "grpo", "other"]):
        assert looks_of({arm: arm for arm in order}) == {"gdpo": 0, "grpo": 1, "other": 2}
    several = {"first": "grpo", "second": "grpo", "third": "gdpo"}
    assert looks_of(several) == {"first": 1, "second": 2, "third": 0}
    assert looks_of({"half": "grpo", "grpo": "grpo"}) == {"half": 2, "grpo": 1}


def test_rewards_have_no_estimators_colour_and_each_its_own_look():
    looks = [free_look(number) for number in range(24)]
    assert len({(look % 6, (look + look // 6) % 6) for look in looks}) == 24
    assert not {look % 6 for look in looks} & {*OF_ESTIMATOR.values()}


def test_the_estimator_of_an_arm_is_that_of_its_configuration():
    def arm(name, **algorithm):
        config = OmegaConf.create({"algorithm": algorithm})
        return made_arm(name, {1: {"actor/entropy": 1.0}}, configs=[config])

    by_settings = arm("mine", adv_estimator="grpo"), arm("theirs", adv_estimator="gdpo")
    assert looks_of_arms(by_settings) == {"mine": 1, "theirs": 0}
    summed = arm("grpo_batch_norm", adv_estimator="gdpo", gdpo={"group_norm": "summed"})
    assert looks_of_arms([summed]) == {"grpo_batch_norm": 2}
    unknown = made_arm("grpo", {1: {"actor/entropy": 1.0}})
    assert looks_of_arms([unknown]) == {"grpo": 1}
    [first] = sections([unknown])
    assert first.charts[0].lines[0].look == 1


def chart_named(arms, title):
    charts = [chart for section in sections(arms) for chart in section.charts]
    return next((chart for chart in charts if chart.title == title), None)


def shares_of(*runs):
    """An arm of runs with {step: (share of a, share of b)}; None where a step does not log it."""

    def logged(pair):
        named = zip("ab", pair, strict=True)
        return {f"gdpo/{name}/share": value for name, value in named if value is not None}

    metrics_of_runs = ({step: logged(pair) for step, pair in run.items()} for run in runs)
    return made_arm("gdpo", *metrics_of_runs)


SHARE = "How much of the update comes from each reward"


def test_the_share_of_each_reward_is_a_smoothed_line():
    arm = shares_of({step: (step / 10, 1 - step / 10) for step in range(1, 9)})
    chart = chart_named([arm], SHARE)
    a, b = chart.lines
    # the mean of steps 4 to 8 is 6/10
    assert a.values[-1] == pytest.approx(0.6) and b.values[-1] == pytest.approx(0.4)
    assert (a.label, b.label, chart.axis) == ("a", "b", (0, 1))
    assert chart_named([made_arm("gdpo", {1: {"gdpo/a/mean": 1.0}})], SHARE) is None


def test_a_reward_that_samples_lack_has_a_chart():
    one, other = {"gdpo/a/missing": 0.0}, {"gdpo/a/missing": 0.0, "gdpo/b/missing": 0.5}
    [line] = chart_named([made_arm("gdpo", {1: other})], "Samples without a reward").lines
    assert (line.label, line.values, line.look) == ("b", [0.5], free_look(1))
    assert chart_named([made_arm("gdpo", {1: one})], "Samples without a reward") is None
    # the lowest of a band may be 0
    band = made_arm("gdpo", *[{1: {"gdpo/a/missing": x}} for x in (0.0, 0.0, 0.0, 0.5, 0.5)])
    assert len(chart_named([band], "Samples without a reward").lines) == 3


def test_what_is_no_number_is_a_gap_and_breaks_no_json():
    chart = chart_named([shares_of({1: (1.0, None), 2: (0.5, 0.5), 3: (math.nan, 0.5)})], SHARE)
    a, b = as_data([chart], 3)[0]["lines"]
    assert (a["x"], a["y"]) == ([1, 2, 3], [1.0, 0.75, None])
    assert (b["x"], b["y"]) == ([2, 3], [0.5, 0.5])
    json.dumps(as_data([chart], 3), allow_nan=False)


def test_a_chart_without_anything_to_see_is_left_out():
    values = {"gdpo/a/mean": 0.0, "actor/kl_loss": 0.0, "actor/entropy": math.nan}
    metrics = {step: {**values, "actor/grad_norm": 1.0} for step in (1, 2)}
    [first] = sections([made_arm("gdpo", metrics)])
    # a reward of 0 is seen
    assert [chart.title for chart in first.charts] == ["a", "Gradient norm"]


def test_the_first_screen_has_all_rewards_and_the_entropy_where_there_is_room():
    values = {f"gdpo/r{i}/mean": 1.0 for i in range(5)} | {"actor/grad_norm": 1.0}
    metrics = {1: values | {"response_length/mean": 30.0, "actor/ppo_kl": 0.0}}
    first, more = sections([made_arm("gdpo", metrics)])
    assert [chart.title for chart in first.charts] == ["r0", "r1", "r2", "r3", "r4"]
    assert [chart.title for chart in more.charts] == ["Gradient norm", "Response length"]
    # 0 is on every axis, so that noise stays small
    assert {chart.axis for chart in (*first.charts, *more.charts)} == {(0, 0)}
    ids = [chart.id for chart in (*first.charts, *more.charts)]
    assert ids == [f"chart-{number}" for number in range(7)]


def test_fewer_than_five_runs_have_a_line_each_and_more_a_band():
    def lines(count):
        arm = made_arm("gdpo", *({1: {"gdpo/a/mean": float(i)}} for i in range(count)))
        drawn = lines_of(arm, lambda run: run.trained["a"], "gdpo", 0)
        return [(line.label, line.kind, line.values) for line in drawn]

    assert lines(1) == [("gdpo", "", [0.0])]
    assert lines(2) == [("gdpo0", "", [0.0]), ("gdpo1", "", [1.0])]
    assert lines(5) == [("gdpo", "", [2.0]), ("gdpo", "low", [1.0]), ("gdpo", "high", [3.0])]


def test_only_an_arms_name_is_left_out_of_the_name_of_its_run():
    """A reward may begin as a run does, and its line would lose the reward."""
    arm = made_arm("judge", *({1: {"gdpo/judge/mean": 1.0}} for _ in range(2)))
    for arm_name, expected in (
        ("judge", ["judge0", "judge1"]),
        ("gdpo", ["judge, judge0", "judge, judge1"]),
    ):
        named = RunsOfArm(arm_name, arm.runs)
        drawn = lines_of(named, lambda run: run.trained["judge"], "judge", 0)
        assert [line.label for line in drawn] == expected


# --- thinning ------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=400),
    st.integers(8, 60),
)
@example([math.nan] * 20 + [0.0] * 20, 8)
@example([0.0] * 20 + [-1.0] + [0.0] * 20, 8)
def test_extremes_and_ends_survive_thinning(values, most):
    kept = thinned(values, most)
    assert kept == sorted({*kept}) and len(kept) <= most
    assert {0, len(values) - 1} <= {*kept}
    there = [value for value in values if not math.isnan(value)]
    seen = [values[place] for place in kept if not math.isnan(values[place])]
    if there:
        assert (min(seen), max(seen)) == (min(there), max(there))


def test_the_charts_of_ten_runs_of_5_000_steps_are_small():
    noise = [0.3 + 0.1 * math.sin(1.7 * step * step) for step in range(5000)]
    of_each = ("mean", "share", "correlation", "varies")
    keys = [f"gdpo/{reward}/{what}" for reward in "abc" for what in of_each]
    keys += OF_TRAINING
    runs = []
    for number in range(2):  # ten of two, which is the same to all that is made of them
        metrics = {step: dict.fromkeys(keys, noise[step]) for step in range(5000)}
        metrics[500 * number + 7]["actor/grad_norm"] = 900.0
        runs.append(Run(Path(f"run{number}"), metrics))
    arms = [RunsOfArm(f"run{number}", [runs[number % 2]]) for number in range(10)]
    data = as_data([chart for section in sections(arms) for chart in section.charts], 4999)
    assert sum(len(chart["lines"]) for chart in data) == 10 * 21
    # 2 MB less what the rest of a page has: uPlot, and texts of examples
    assert len(json.dumps(data, separators=(",", ":"))) < 1_900_000
    [norms] = [chart["lines"] for chart in data if chart["title"] == "Gradient norm"]
    for number, line in enumerate(norms):
        assert dict(zip(line["x"], line["y"], strict=True))[500 * (number % 2) + 7] == 900


# --- findings, and uPlot -------------------------------------------------------------------------


def test_a_finding_leads_to_the_chart_of_its_metric_or_reward():
    names = ["correct", "correct (a)", "gdpo/<reward>/share", "actor/grad_norm"]
    charts = [Chart(name, name, "", (0, 0), []) for name in names]

    def about(topic, what=""):
        return chart_of(Finding(topic, what, 1, 2, ""), charts).about

    assert about("gradient") == "actor/grad_norm"
    assert about("untrained") == "actor/grad_norm"
    assert about("traded correct (a)") == "correct (a)"
    assert about("collapse correct (a)") == "correct (a)"
    assert about("constant correct") == "correct"  # its own chart is not there
    assert about("no number", "actor/grad_norm is NaN or infinite") == "actor/grad_norm"
    assert about("ignored correct") == "gdpo/<reward>/share"
    assert about("entropy") == "correct"  # its metric is in no chart
    assert chart_of(Finding("gradient", "", 1, 2, ""), []) is None


def test_uplot_is_as_its_readme_says():
    readme = (FOLDER / "uplot/README.md").read_text()
    sums = dict(reversed(line.split()) for line in readme.split("```")[1].split("\n") if line)
    assert {*sums} == {path.name for path in (FOLDER / "uplot").glob("uPlot*")}
    for name, expected in sums.items():
        assert hashlib.sha256((FOLDER / "uplot" / name).read_bytes()).hexdigest() == expected
    [version] = {*re.findall(r"uPlot (\d+\.\d+\.\d+)", readme)}
    assert f"(v{version})" in (FOLDER / "uplot/uPlot.iife.min.js").read_text()[:80]
    assert f"uPlot {version}" in (FOLDER / "page.html.jinja").read_text()
    assert "The MIT License" in (FOLDER / "uplot/LICENSE").read_text()
