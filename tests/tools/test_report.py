"""`verl-gdpo report`: arithmetic over seeds, tables, examples, and the page."""

import base64
import hashlib
import json
import math
import re
import resource
import shlex
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_arms import made_arm
from run_folder_writer import GROUPS, PROMPT, make_run, rollout_dump, write_metrics

from verl_gdpo.tools import replay, summary
from verl_gdpo.tools.report import main
from verl_gdpo.tools.report.charts import sections
from verl_gdpo.tools.report.examples import ROLLOUTS_SHOWN, example_groups
from verl_gdpo.tools.report.page import (
    CHARACTERS,
    Remark,
    build_page,
    headline,
    prompt_end,
    response_start,
    signed,
    with_interval,
    write,
)
from verl_gdpo.tools.report.runs import Run, is_of_one_run, over_runs, read_arms, trailing_mean
from verl_gdpo.tools.report.tables import as_text, differing_keys, results

HOSTILE = "</pre><script>document.title='taken'</script><img src=x onerror=alert(1)>"
HOSTILE_NAME = HOSTILE.replace("/", "")  # of a reward, in which no slash may be


class Parts(HTMLParser):
    """What a browser makes of a page: its elements, what they refer to, and the text."""

    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.ids, self.links, self.scripts = [], [], [], [], []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "srcset", "href"):
                self.sources.append(value)
            elif name == "id":
                self.ids.append(value)
        if "data-first" in dict(attributes):
            self.links.append(dict(attributes))

    def handle_data(self, data):
        if self.tags[-1:] == ["script"]:
            self.scripts.append(data)
        self.text += data


def parts_of(text):
    page = Parts()
    page.feed(text)
    return page


def data_of(text):
    """{title: {label: {step: value}}} of the charts of a page."""
    charts = json.loads(next(text for text in parts_of(text).scripts if text.startswith("[")))
    return {
        chart["title"]: {
            line["label"]: dict(zip(line["x"], line["y"], strict=True)) for line in chart["lines"]
        }
        for chart in charts
    }


def arm_of(*curves, name="gdpo", key="gdpo/format/mean"):
    """An arm with a run for each {step: value}."""
    return made_arm(name, *({step: {key: v} for step, v in curve.items()} for curve in curves))


def read_format(run):
    return run.curves["gdpo/format/mean"]


def test_median_and_quartiles_over_seeds():
    # sorted 1 2 3 10: the quartiles lie at positions .75, 1.5 and 2.25 of 0..3
    found = over_runs(arm_of({1: 10.0, 2: 5.0}, {1: 1.0}, {1: 3.0, 2: 7.0}, {1: 2.0}), read_format)
    # two runs have step 2: 5 and 7
    assert found == {"": {1: 2.5, 2: 6.0}, "low": {1: 1.75, 2: 5.5}, "high": {1: 4.75, 2: 6.5}}
    assert over_runs(arm_of({1: 10.0}), read_format) == {"": {1: 10.0}}


def test_each_run_is_smoothed_before_the_median():
    assert trailing_mean({1: 1.0, 2: 3.0, 3: 8.0}, 2) == {1: 1.0, 2: 2.0, 3: 5.5}
    arm = arm_of({1: 0.0, 2: 4.0}, {1: 10.0, 2: 0.0}, {1: 2.0, 2: 2.0})
    # smoothed, step 2 is 2, 5 and 2; unsmoothed 4, 0 and 2
    assert over_runs(arm, read_format, smooth=2)[""] == {1: 2.0, 2: 2.0}
    assert over_runs(arm, read_format)[""] == {1: 2.0, 2: 2.0}
    assert over_runs(arm, read_format, smooth=2)["high"] == {1: 6.0, 2: 3.5}
    assert over_runs(arm, lambda run: {}) == {}


def test_a_gap_stays_a_gap_and_takes_no_other_step_with_it():
    smooth = trailing_mean({1: 1.0, 2: math.nan, 3: 4.0}, 3)
    assert (smooth[1], smooth[3]) == (1.0, 2.5) and math.isnan(smooth[2])
    found = over_runs(arm_of({1: math.nan, 2: 3.0}, {1: 2.0, 2: 5.0}, {3: math.nan}), read_format)
    assert (found[""][1], found[""][2]) == (2.0, 4.0) and math.isnan(found[""][3])


def test_the_mean_of_steps_whose_sum_is_no_float_takes_no_other_step_with_it():
    curve = dict(enumerate([1.0, 1e308, 1e308, *[2.0] * 6], start=1))
    means = trailing_mean(curve, 5)
    assert means[3] == pytest.approx(1e308 / 1.5)
    assert (means[8], means[9]) == (2.0, 2.0)


def test_metrics_that_are_no_number_are_a_gap_and_a_finding(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=9)
    lines = [json.loads(line) for line in (run / "metrics" / "1.jsonl").read_text().splitlines()]
    for step, value in ((3, math.nan), (9, None)):
        lines[step]["data"] |= dict.fromkeys(["gdpo/format/mean", "gdpo/format/energy"], value)
    for line in lines:
        line["data"]["actor/grad_norm"] = math.inf
    write_metrics(run, lines)
    found = "no finite number: actor/grad_norm, gdpo/format/energy, gdpo/format/mean"
    assert main([str(run)]) == 0
    text = (run / "report" / "index.html").read_text()
    assert f"{found} steps 0 to 9." in " ".join(parts_of(text).text.split())
    curve = data_of(text)["format"]["gdpo"]
    assert [step for step, value in curve.items() if value is None] == [3, 9]
    capsys.readouterr()
    assert summary.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert f"FINDING: {found} (steps 0 to 9)." in out
    assert re.search(r"^format +0\.\d+ +nan ", out, re.M)


def test_the_table_of_results():
    training = arm_of({1: 0.0, 9: 1.0}, {1: 2.0, 9: 3.0})
    tested = arm_of({0: 0.25}, name="grpo", key="val-aux/rlla/format/mean@1")
    assert results([training, tested]).rows == [
        # the mean of steps 1 and 9: there are no others
        ("format", "gdpo", "2", "0, 2", "0.5, 2.5", "-", "-"),
        # one validation is not both
        ("format", "grpo", "1", "-", "-", "0.25", "-"),
    ]


def test_a_value_of_another_step_says_so():
    # of two tasks, the second had no sample in the first and the last step
    metrics = {step: {"gdpo/a/mean/x": 0.5} for step in (1, 2, 3)}
    metrics[2]["gdpo/a/mean/y"] = 0.25
    assert results([made_arm("gdpo", metrics)]).rows == [
        ("a (x)", "gdpo", "0.5", "0.5", "-", "-"),
        ("a (y)", "gdpo", "0.25 (step 2)", "0.25 (step 2)", "-", "-"),
    ]


def test_the_end_of_the_table_is_that_of_the_curve():
    """The chart draws means of five steps, and its legend has the last one."""
    values = {step: step**2 / 7 for step in range(1, 13)}
    arm = arm_of(values)
    table = results([arm])
    assert table.header == (
        "reward",
        "arm",
        "first step",
        "last 5 steps",
        "validation before",
        "after",
    )
    [row] = table.rows
    [line] = sections([arm])[0].charts[0].lines
    assert row[2:4] == (as_text(line.values[0]), as_text(line.values[-1])) == ("0.1429", "14.57")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0.064062, "0.06406"), (68.859, "68.86"), (123456.0, "123500"), (-0.0, "0")),
        *((1.0, "1"), (0.00001234, "0.00001234"), (math.nan, "no number")),
        *((-1.2345e-9, "-1.235e-9"), (1e-6, "0.000001"), (1e20, "1" + "0" * 20), (1e308, "1e+308")),
    ],
)
def test_a_number_is_written_as_the_legends_write_it(value, expected):
    assert as_text(value) == expected


def test_the_headline_is_in_plain_words():
    def run(name, steps, key="gdpo/a/mean"):
        return Run(Path(name), {step: {key: 1.0} for step in range(steps + 1)})

    assert headline([], [run("a", 60)]) == "No problem found in 60 steps"
    assert (
        headline([], [run("a", 60), run("b", 40)]) == "No problem found in 2 runs of 40 to 60 steps"
    )
    assert headline([], [run("a", 1)]) == "No problem found in 1 step; most rules need 30"
    summed = headline([], [run("a", 60, "critic/score/mean")])
    assert summed == (
        "No problem found in 60 steps. The rewards of a were not looked at one by one: that needs "
        "reward.reward_manager.name=gdpo"
    )
    over = Remark("the entropy fell", is_over=True)
    assert headline([over], [run("a", 60)]) == "1 problem found in 60 steps, of which 1 is over"
    assert headline([Remark("b"), over], [run("a", 60)]).startswith("2 problems found in 60 steps")


def test_what_the_configurations_differ_in(tmp_path):
    a, b, c = (
        make_run(tmp_path / f"{arm}{seed}", arm, seed, steps=2)
        for arm, seed in (("gdpo", 0), ("gdpo", 7), ("grpo", 7))
    )
    config = c / "hydra" / ".hydra" / "config.yaml"
    config.write_text(config.read_text() + "trainer: {n: '${data.seed}'}\n")
    assert differing_keys(read_arms([a])) is None
    text = "trainer: {n: '${data.seed}', default_local_dir: here}\n"
    config.write_text(config.read_text().replace("trainer: {n: '${data.seed}'}\n", text))
    # neither the seeds nor the folders
    table = differing_keys(read_arms([a, b, c]))
    assert table.rows == [("trainer.n", "not there", "${data.seed}")]
    assert differing_keys(read_arms([a, b])) is None


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        *(("seed", True), ("data.seed", True), ("actor_rollout_ref.actor.data_loader_seed", True)),
        *(("run_dir", True), ("trainer.default_local_dir", True), ("trainer.project_name", True)),
        *(("transfer_queue.metrics.port", True), ("actor_rollout_ref.model.path", False)),
        *(("data_dir", False), ("data.train_files", False), ("trainer.nnodes", False)),
        *(("reward.reward_kwargs.seed", False), ("algorithm.gdpo.rewards.seed", False)),
        ("trainer.ray_wait_register_center_timeout", False),
    ],
)
def test_which_settings_say_nothing_of_the_arm(key, expected):
    assert is_of_one_run(key) == expected


def test_an_example_of_each_kind(tmp_path):
    run = read_arms([make_run(tmp_path / "run", steps=4)])[0].runs[0]
    examples = {group.kind: group for group in example_groups(run)}
    assert list(examples) == ["tied", "apart"]
    tied = examples["tied"].rollouts
    # sums 1 1 2 1: mean 1.25, std .5; the first is the best one under GDPO
    assert [rollout.grpo for rollout in tied] == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-4)
    assert tied[1].gdpo != pytest.approx(tied[3].gdpo, abs=0.1)
    for group in examples.values():
        assert [rollout.gdpo for rollout in group.rollouts] == pytest.approx(
            [rollout.logged for rollout in group.rollouts], abs=1e-6
        )
    assert [dict(rollout.rewards) for rollout in examples["apart"].rollouts] == [
        {"correctness": c, "format": f} for c, f in GROUPS["agree"]
    ]
    assert (examples["tied"].step, examples["tied"].prompt) == (4, PROMPT)


def test_the_group_that_differs_most_is_that_of_all_steps_and_of_no_scale(tmp_path):
    """Where few groups have a signal, the batch step makes GDPO's advantages large; this is not it.

    In the later steps one group alone has a signal, so both estimators agree up to their scale.
    """
    run = make_run(tmp_path / "run", steps=9)
    mixed = {"mixed": [(3, 0), (2.5, 1), (-3, 1), (0, 0)], "agree": GROUPS["agree"]}
    silent = {f"equal{i}": GROUPS["equal"] for i in range(9)}
    for step in range(1, 10):
        groups = mixed if step == 1 else {"agree": GROUPS["agree"], **silent}
        (run / "rollouts" / f"{step}.jsonl").write_text(rollout_dump(step, groups=groups))
    [apart] = [g for g in example_groups(read_arms([run])[0].runs[0]) if g.kind == "apart"]
    assert (apart.step, apart.rollouts[0].rewards["correctness"]) == (1, 2.5)


def test_a_kind_that_the_last_step_lacks_comes_from_an_earlier_one(tmp_path):
    run = make_run(tmp_path / "run", steps=4)
    (run / "rollouts" / "6.jsonl").write_text('{"input":')  # verl is writing it
    same = {"equal": GROUPS["equal"]}
    (run / "rollouts" / "5.jsonl").write_text(rollout_dump(5, groups=same))
    examples = example_groups(read_arms([run])[0].runs[0])
    assert [(group.kind, group.step) for group in examples] == [("tied", 4), ("apart", 4)]


def test_of_a_large_group_some_rollouts_are_shown(tmp_path):
    run = make_run(tmp_path / "run", steps=2)
    group = [(i, i % 2) for i in range(40)]
    (run / "rollouts" / "2.jsonl").write_text(rollout_dump(2, groups={"g": group}))
    [found] = example_groups(read_arms([run])[0].runs[0])
    shown = [rollout.gdpo for rollout in found.rollouts]
    assert (len(shown), found.of) == (ROLLOUTS_SHOWN, 40) and shown == sorted(shown, reverse=True)
    # 39 and 0 are the best and the worst: both rewards rise with the number
    assert [found.rollouts[i].rewards["correctness"] for i in (0, -1)] == [39, 0]
    assert f"{ROLLOUTS_SHOWN} of 40 samples." in write(build_page([run]), tmp_path).read_text()


def test_an_interval_is_not_broken_over_lines_and_a_name_is_no_markup():
    expected = '91% <span class="interval">[70%, 103%]</span>'
    assert with_interval("91% [70%, 103%]") == expected
    assert with_interval("a <b>") == "a &lt;b&gt;"


def test_numbers_and_long_texts():
    assert [signed(value) for value in (0.874, -1.5, -0.001)] == ["+0.87", "-1.50", "0.00"]
    long = "x" * CHARACTERS
    assert response_start(f"{long}abc") == f"{long} [3 more characters]"
    assert response_start("short") == prompt_end("short") == "short"
    assert prompt_end(f"abc{long}") == f"[3 more characters before] {long}"


def test_the_page_escapes_what_a_model_wrote_and_needs_nothing_else(tmp_path, capsys):
    run = make_run(tmp_path / "run<b>", steps=3, output=HOSTILE + "\ud83d")
    data = {f"gdpo/{HOSTILE_NAME}/mean": 0.5, "val-aux/made/<!--<script>/mean@1": 0.1}
    with (run / "metrics" / "1.jsonl").open("a") as file:
        print(json.dumps({"step": 3, "data": data}), file=file)
    assert main([str(run)]) == 0
    index = run / "report" / "index.html"
    assert capsys.readouterr().out.strip() == str(index)
    assert [path.name for path in index.parent.iterdir()] == ["index.html"]
    text = index.read_text()
    page = parts_of(text)
    assert page.tags.count("script") == 2 and HOSTILE in page.text and "b" not in page.tags
    assert HOSTILE_NAME in data_of(text) and "<!--<script>" in data_of(text)
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert "url(" not in text and "@import" not in text
    # the browser runs the script whose sum the policy has, and no other
    _, script = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert re.search("script-src 'sha256-([^']+)'\"", text)[1] == expected
    assert text.count("<script") == 2


def test_the_line_to_paste_is_one_that_replay_takes(tmp_path, capsys):
    run = make_run(tmp_path / "a run", "gdpo", steps=3)
    line = build_page([run]).replay_line
    text = write(build_page([run]), tmp_path / "out").read_text()
    assert f"<code>{line}</code>" in unescape(text)
    command, name, *arguments = shlex.split(line)
    assert (command, name, arguments[0]) == ("verl-gdpo", "replay", str(run))
    replay.main(arguments)
    printed = capsys.readouterr()
    assert printed.err == "" and "== changed ==" in printed.out


def test_the_first_screen_in_its_order(tmp_path):
    run, grpo = (make_run(tmp_path / arm, arm, steps=30) for arm in ("gdpo", "grpo"))
    lines = [json.loads(line) for line in (run / "metrics" / "1.jsonl").read_text().splitlines()]
    for line in lines:
        norm = 22_000 if line["step"] > 20 else 0.3
        line["data"] |= {"actor/grad_norm": norm, "actor/entropy": 0.4}
    write_metrics(run, lines)
    text = write(build_page([run, grpo]), tmp_path / "out").read_text()
    order = [
        "<title>gdpo, grpo</title>",
        '<body class="told">',
        "1 problem found in 2 runs of 30 steps</p>",
        '<ul id="findings">',
        "gdpo: the gradient norm is 2.2e+04; at the start it was 0.3</span>",
        '<figcaption><span class="strong">correctness</span>',
        '<figcaption><span class="strong">format</span>',
        ">Entropy</span>",
        ">Gradient norm</span>",
        '<section id="advice">',
        "<h3>gdpo</h3>",
        "<h3>grpo</h3>",
        '<section id="results">',
        "Which reward drives the update?",
        "Is a reward dead or saturated?",
        "More of the training",
        '<section id="examples">',
        '<details id="about">',
        "</details>\n</main>",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    page = parts_of(text)
    # a finding leads to its step, in the chart of what it is about
    [link] = page.links
    assert (link["data-first"], link["data-last"]) == ("21", "30")
    titles = re.findall(
        r'<figure id="(chart-\d+)">\n<figcaption><span class="strong">(.*?)</', text
    )
    assert dict(titles)[link["href"].removeprefix("#")] == "Gradient norm"
    assert [id for id, _ in titles] == [id for id in page.ids if id.startswith("chart")]


def test_the_texts_of_ten_runs_are_a_small_page(tmp_path):
    """Of ten arms, so that no run is pooled; test_charts.py looks at the lines of long runs."""
    folders = [make_run(tmp_path / f"run{n}", steps=2, configuration=False) for n in range(10)]
    groups = {name: group * 8 for name, group in GROUPS.items()}
    for folder in folders:
        (folder / "rollouts" / "2.jsonl").write_text(rollout_dump(2, "long " * 2000, groups))
    index = write(build_page(folders), tmp_path / "out")
    assert index.stat().st_size < 700_000


def test_runs_that_the_report_refuses(tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "one", steps=3)
    for arguments in ([str(run), str(run)], ["--arm", f"a={run}", "--arm", f"b={run}"]):
        assert main(arguments) == 1
        assert "named twice" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


@pytest.mark.parametrize("place", ["file", "file/x", "folder"])
def test_a_page_that_cannot_be_written_is_told_in_a_sentence(tmp_path, capsys, place):
    run = make_run(tmp_path / "run", steps=3)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / "index.html").mkdir(parents=True)
    out = tmp_path / place
    assert main([str(run), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"verl-gdpo report: --out {out}: the page cannot be written: ")
    assert error.count("\n") == 1


def test_a_full_disk_leaves_the_page_before(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=3)
    assert main([str(run), "--out", str(tmp_path / "out")]) == 0
    index = tmp_path / "out" / "index.html"
    before = index.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        assert main([str(run), "--out", str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "the page cannot be written: " in capsys.readouterr().err
    assert index.read_bytes() == before
    assert list(index.parent.iterdir()) == [index]


def test_arms_of_one_name_are_told_apart(tmp_path):
    """Two runs of one script, whose folders have the name of the experiment."""
    runs = [
        make_run(tmp_path / name / "exp", steps=3, configuration=False) for name in ("one", "two")
    ]
    assert [arm.name for arm in read_arms(runs)] == ["one/exp", "two/exp"]
    arms = read_arms(runs, arm_of={runs[0]: "two/exp"})
    assert [arm.name for arm in arms] == ["two/exp 1", "two/exp 2"]
    other = make_run(tmp_path / "other", steps=3, configuration=False)
    arms = read_arms([*runs, other], arm_of={runs[0]: "two/exp", other: "two/exp 1"})
    assert [arm.name for arm in arms] == ["two/exp 2", "two/exp 3", "two/exp 1"]


def test_runs_whose_folders_have_one_name_are_told_apart_by_the_folders_around(tmp_path):
    """Two runs of one name in the same arm, and one in another, of which two have stopped."""
    runs = [
        make_run(tmp_path / "a" / "seed2", "gdpo", 0, steps=2),
        make_run(tmp_path / "b" / "seed2", "gdpo", 1, steps=30),
        make_run(tmp_path / "c" / "seed2", "grpo", 0, steps=2),
    ]
    others = [
        make_run(tmp_path / arm / f"seed{seed}", arm, seed, steps=30)
        for arm in ("gdpo", "grpo")
        for seed in (3, 4)
    ]
    page = build_page([*runs, *others])
    names = [run.name for arm in page.arms for run in arm.runs]
    assert names[:4] == ["a/seed2", "b/seed2", "gdpo/seed3", "gdpo/seed4"]
    assert names[4:] == ["c/seed2", "grpo/seed3", "grpo/seed4"]
    stopped = [remark.text.partition(" got to")[0] for remark in page.remarks if not remark.chart]
    assert stopped == ["a/seed2", "c/seed2"]
    [alone] = read_arms(runs[:1])
    assert alone.runs[0].name == "seed2"


def test_a_run_without_rollouts_or_own_metrics_still_has_a_page(tmp_path):
    write_metrics(tmp_path / "run", [{"step": 1, "data": {"gdpo/a/mean": 0.5}}])
    page = build_page([tmp_path / "run"])
    assert "no dump" in page.examples["run"]
    why = page.advice["run"]
    text = write(page, tmp_path / "out").read_text()
    assert "no dump" in why and text.count(why) == 2
    assert data_of(text) == {"a": {"run": {1: 0.5}}}
