"""`verl-gdpo report`: arithmetic over seeds, what is said where metrics lack, and the page."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folder_writer import GROUPS, PROMPT, make_run, rollout_dump, write_metrics
from verl_gdpo.tools.plots import Line, Panel
from verl_gdpo.tools.report.sections import (
    Chart,
    Section,
    decimal,
    first_to_last,
    without_empty_charts,
)

from verl_gdpo.tools import summary
from verl_gdpo.tools.report import main
from verl_gdpo.tools.report.charts import (
    collapse,
    follow_length,
    influence,
    reward_panels,
    rewards,
)
from verl_gdpo.tools.report.examples import example_groups
from verl_gdpo.tools.report.page import build_page, response_start, signed, with_code, write
from verl_gdpo.tools.report.runs import (
    Run,
    RunsOfArm,
    band,
    is_of_one_run,
    over_runs,
    read_arms,
    trailing_mean,
)
from verl_gdpo.tools.report.tables import differences, results, runs, warnings

HOSTILE = "</pre><script>document.title='taken'</script><img src=x onerror=alert(1)>"


class Parts(HTMLParser):
    """What a browser makes of a page: its elements, what they refer to, and the text."""

    def __init__(self):
        super().__init__()
        self.tags, self.sources, self.alternatives, self.text = [], [], [], ""

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "srcset", "href"):
                self.sources.append(value)
            elif name == "alt":
                self.alternatives.append(value)

    def handle_data(self, data):
        self.text += data


def arm_of(*curves, name="gdpo", key="gdpo/format/mean"):
    """An arm with a run for each {step: value}."""
    members = [{step: {key: value} for step, value in curve.items()} for curve in curves]
    return RunsOfArm(name, [Run(Path(f"{name}{i}"), metrics) for i, metrics in enumerate(members)])


def test_median_and_quartiles_over_seeds():
    # sorted 1 2 3 10: the quartiles lie at positions .75, 1.5 and 2.25 of 0..3
    found = band([{1: 10.0, 2: 5.0}, {1: 1.0}, {1: 3.0, 2: 7.0}, {1: 2.0}])
    assert found.steps == [1, 2] and found.runs == 4
    assert (found.low[0], found.median[0], found.high[0]) == (1.75, 2.5, 4.75)
    # two runs have step 2: 5 and 7
    assert (found.low[1], found.median[1], found.high[1]) == (5.5, 6.0, 6.5)


def test_each_run_is_smoothed_before_the_median():
    assert trailing_mean({1: 1.0, 2: 3.0, 3: 8.0}, 2) == {1: 1.0, 2: 2.0, 3: 5.5}
    arm = arm_of({1: 0.0, 2: 4.0}, {1: 10.0, 2: 0.0}, {1: 2.0, 2: 2.0})
    # smoothed, step 2 is 2, 5 and 2; unsmoothed 4, 0 and 2
    read = lambda metrics: {step: values["gdpo/format/mean"] for step, values in metrics.items()}  # noqa: E731
    assert over_runs(arm, read, smooth=2).median == [2.0, 2.0]
    assert over_runs(arm, read).median == [2.0, 2.0]
    assert over_runs(arm, read, smooth=2).high == [6.0, 3.5]
    assert over_runs(arm, lambda metrics: {}) is None


def test_a_gap_stays_a_gap_and_takes_no_other_step_with_it():
    smooth = trailing_mean({1: 1.0, 2: math.nan, 3: 4.0}, 3)
    assert (smooth[1], smooth[3]) == (1.0, 2.5) and math.isnan(smooth[2])
    found = band([{1: math.nan, 2: 3.0}, {1: 2.0, 2: 5.0}, {3: math.nan}])
    assert found.median[:2] == [2.0, 4.0] and math.isnan(found.median[2])


def test_metrics_that_are_no_number_are_a_gap_and_a_warning(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=9)
    lines = [json.loads(line) for line in (run / "metrics" / "1.jsonl").read_text().splitlines()]
    for step, value in ((3, math.nan), (9, None)):
        lines[step]["data"] |= dict.fromkeys(["gdpo/format/mean", "gdpo/format/energy"], value)
    for line in lines:
        line["data"]["actor/grad_norm"] = math.inf
    write_metrics(run, lines)
    said = [
        "no finite number at step 3, 9: gdpo/format/mean, gdpo/format/energy",
        "no finite number at step 0, 1, 2, 3, 4 and 5 more: actor/grad_norm",
    ]
    assert main([str(run)]) == 0
    page = Parts()
    page.feed((run / "report" / "index.html").read_text())
    assert all(f"{run}: {text}. Lines leave it out." in page.text for text in said)
    curve = reward_panels(read_arms([run]))["format"].lines[0]
    for y in (curve.y, curve.behind):
        assert [step for step, v in zip(curve.x, y, strict=True) if math.isnan(v)] == [3, 9]
    capsys.readouterr()
    assert summary.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert all(f"WARNING: {text}\n" in out for text in said)
    assert re.search(r"^format +0\.\d+ +nan ", out, re.M)


def test_one_run_has_no_band_and_its_steps_behind():
    [panel] = reward_panels([arm_of({1: 0.0, 2: 1.0})]).values()
    assert (panel.lines[0].low, panel.lines[0].behind) == ((), [0.0, 1.0])
    [panel] = reward_panels([arm_of({1: 0.0}, {1: 1.0}), arm_of({1: 2.0}, name="grpo")]).values()
    # fewer than five runs: a line each
    assert [(line.label, len(line.low), line.y) for line in panel.lines] == [
        ("gdpo", 0, [0.0]),
        ("gdpo", 0, [1.0]),
        ("grpo", 0, [2.0]),
    ]
    assert {line.behind for line in panel.lines} == {()}
    [panel] = reward_panels([arm_of(*({1: float(i)} for i in range(5)))]).values()
    assert [(line.y, line.low, line.high) for line in panel.lines] == [([2.0], [1.0], [3.0])]


def test_runs_are_grouped_by_the_arm_of_their_configuration(tmp_path):
    folders = [
        make_run(tmp_path / "a", "grpo", seed=1, steps=4),
        make_run(tmp_path / "b", "gdpo", seed=1, steps=4),
        make_run(tmp_path / "c", "grpo", seed=2, steps=6),
        make_run(tmp_path / "d", configuration=False, steps=4),
    ]
    arms = read_arms(folders)
    assert [(arm.name, [run.folder.name for run in arm.runs]) for arm in arms] == [
        ("grpo", ["a", "c"]),
        ("gdpo", ["b"]),
        ("d", ["d"]),
    ]
    assert [row[5:7] for row in runs(arms).rows] == [("1", "4"), ("2", "6"), ("1", "4"), ("-", "4")]
    said = "\n".join(warnings(arms))
    assert "One run of gdpo, d: differences may be chance." in said
    assert "The runs end at different steps (grpo at 4, 6; gdpo at 4; d at 4)." in said
    assert "Results and differences are up to step 4, the last one that all runs have" in said
    assert results(arms).caption.startswith("Mean reward up to step 4, the last one")
    assert warnings(read_arms(folders[1:2])) == []
    assert warnings(read_arms(folders[:2])) == ["One run per arm: differences may be chance."]


def test_the_table_of_results():
    training = arm_of({1: 0.0, 9: 1.0}, {1: 2.0, 9: 3.0})
    tested = arm_of({0: 0.25}, name="grpo", key="val-aux/rlla/format/mean@1")
    assert results([training, tested]).rows == [
        ("format", "gdpo", "2", "0.000, 2.000", "1.000, 3.000", "-", "-"),
        # one validation is not both
        ("format", "grpo", "1", "-", "-", "0.250", "-"),
    ]


def test_a_value_of_another_step_says_so():
    # of two tasks, the second had no sample in the first and the last step
    metrics = {step: {"gdpo/a/mean/x": 0.5} for step in (1, 2, 3)}
    metrics[2]["gdpo/a/mean/y"] = 0.25
    arm = RunsOfArm("gdpo", [Run(Path("run"), metrics)])
    assert results([arm]).rows == [
        ("a (x)", "gdpo", "1", "0.500", "0.500", "-", "-"),
        ("a (y)", "gdpo", "1", "0.250 (step 2)", "0.250 (step 2)", "-", "-"),
    ]


def test_what_the_configurations_differ_in(tmp_path):
    a, b, c = (
        make_run(tmp_path / f"{arm}{seed}", arm, seed, steps=2)
        for arm, seed in (("gdpo", 0), ("gdpo", 7), ("grpo", 7))
    )
    config = c / "hydra" / ".hydra" / "config.yaml"
    config.write_text(config.read_text() + "trainer: {n: '${data.seed}'}\n")
    assert differences(read_arms([a])) is None
    text = "trainer: {n: '${data.seed}', default_local_dir: here}\n"
    config.write_text(config.read_text().replace("trainer: {n: '${data.seed}'}\n", text))
    # neither the seeds nor the folders
    assert differences(read_arms([a, b, c])).rows == [("trainer.n", "not there", "${data.seed}")]
    assert differences(read_arms([a, b])) is None


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


def test_metrics_that_are_not_there_are_named():
    old, new = arm_of({1: 0.0}), arm_of({1: 1.0}, name="grpo", key="gdpo/format/correlation")
    [note] = rewards([old]).notes
    assert note.startswith("The metrics hold no val-aux/<source>/<reward>/mean@N: ")
    assert "trainer.test_freq" in note
    [note] = collapse([old]).notes
    assert all(f"gdpo/{name}" in note for name in ("tied_pairs_grpo", "distinct_gdpo", "no_signal"))
    section = influence([old, new])
    assert [chart.name for chart in section.charts] == ["correlation-grpo"]
    notes = {note.partition(" hold")[0]: note for note in section.notes}
    assert notes["The metrics of gdpo0"].startswith(
        "The metrics of gdpo0 hold no gdpo/<reward>/correlation:"
    )
    wholly = notes["The metrics"]
    assert wholly.startswith("The metrics hold no gdpo/<reward>/share:")


def test_influence_is_the_share_first_and_collapse_the_tied_pairs(tmp_path):
    arms = read_arms([make_run(tmp_path / "run", steps=4)])
    charts = influence(arms).charts
    assert [chart.name for chart in charts] == ["share-gdpo", "correlation-gdpo"]
    assert charts[0].panel.ylabel == "share of the advantage"
    found = [chart.name for chart in collapse(arms).charts]
    assert found == ["tied-gdpo", "gdpo-no_signal", "gdpo-cancelled", "distinct-gdpo"]


def test_an_example_of_each_kind(tmp_path):
    run = read_arms([make_run(tmp_path / "run", steps=4)])[0].runs[0]
    examples = {group.kind: group for group in example_groups(run)}
    assert list(examples) == ["tied", "cancelled", "apart", "equal"]
    tied = examples["tied"].rollouts
    # sums 1 1 2 1: mean 1.25, std .5
    assert [rollout.grpo for rollout in tied] == pytest.approx([-0.5, -0.5, 1.5, -0.5], abs=1e-4)
    assert tied[0].gdpo != pytest.approx(tied[1].gdpo, abs=0.1)
    for group in examples.values():
        assert [rollout.gdpo for rollout in group.rollouts] == pytest.approx(
            [rollout.logged for rollout in group.rollouts], abs=1e-6
        )
    assert {rollout.gdpo for rollout in examples["cancelled"].rollouts} == {0.0}
    assert [dict(rollout.rewards) for rollout in examples["apart"].rollouts] == [
        {"correctness": c, "format": f} for c, f in GROUPS["agree"]
    ]
    assert (examples["equal"].step, examples["equal"].prompt) == (4, PROMPT)


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
    assert (apart.step, apart.rollouts[0].rewards["correctness"]) == (1, 3)


def test_silent_groups_bring_no_group_further_apart(tmp_path):
    """In units of a std that counts them, the group of step 9 would be ahead."""
    run = make_run(tmp_path / "run", steps=9)
    strong, mild = [(3, 0), (2.5, 1), (-3, 1), (0, 0)], [(3, 0), (2.9, 1), (-3, 0), (-2.9, 1)]
    silent = {f"equal{i}": GROUPS["equal"] for i in range(9)}
    for step, groups in ((1, {"a": strong}), (9, {"a": mild, **silent})):
        groups = {**groups, "agree": GROUPS["agree"]}
        (run / "rollouts" / f"{step}.jsonl").write_text(rollout_dump(step, groups=groups))
    [apart] = [g for g in example_groups(read_arms([run])[0].runs[0]) if g.kind == "apart"]
    assert apart.step == 1


def test_a_kind_that_the_last_step_lacks_comes_from_an_earlier_one(tmp_path):
    run = make_run(tmp_path / "run", steps=4)
    (run / "rollouts" / "6.jsonl").write_text('{"input":')  # verl is writing it
    same = {"equal": GROUPS["equal"]}
    (run / "rollouts" / "5.jsonl").write_text(rollout_dump(5, groups=same))
    examples = example_groups(read_arms([run])[0].runs[0])
    assert [(group.kind, group.step) for group in examples] == [
        ("tied", 4),
        ("cancelled", 4),
        ("apart", 4),
        ("equal", 5),
    ]


def test_numbers_and_long_texts():
    assert [signed(value) for value in (0.874, -1.5, -0.001, 0)] == [
        "+0.87",
        "-1.50",
        "0.00",
        "0.00",
    ]
    assert response_start("x" * 2600) == "x" * 2500 + " [100 more characters]"
    assert response_start("short") == "short"


def test_the_page_escapes_what_a_model_wrote_and_needs_nothing_else(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=3, output=HOSTILE + "\ud83d")
    assert main([str(run)]) == 0
    index = run / "report" / "index.html"
    assert capsys.readouterr().out.strip() == str(index)
    text = index.read_text()
    page = Parts()
    page.feed(text)
    assert "script" not in page.tags and HOSTILE in page.text
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert "url(" not in text and "@import" not in text
    charts = page.tags.count("figure")
    assert charts == page.tags.count("img") == len(list(index.parent.glob("*.png"))) > 10
    assert len(page.sources) > 2 * charts
    assert all(len(alt) > 40 for alt in page.alternatives) and len(page.alternatives) == charts


def test_runs_that_the_report_refuses(tmp_path, capsys):
    run = make_run(tmp_path / "runs" / "one", steps=3)
    for folders, message in (
        ([tmp_path / "nowhere"], "no such file or folder; expected the folder of a run"),
        ([tmp_path / "runs"], "the runs in it are one: name those"),
        ([run, run], "named twice"),
    ):
        assert main([str(folder) for folder in folders]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2


def test_a_run_without_rollouts_or_own_metrics_still_has_a_page(tmp_path):
    write_metrics(
        tmp_path / "run", [{"step": 1, "data": {"gdpo/a b/mean": 0.5, "gdpo/a_b/mean": 1}}]
    )
    page = build_page([tmp_path / "run"])
    assert "no rollout dump" in page.examples["run"]
    kept = [part for part in page.sections if part.anchor in ("rewards", "validation", "length")]
    thin = replace(page, title="t", several=False, sections=kept)
    text = write(thin, tmp_path / "out").read_text()
    assert "no rollout dump" in text and "hold no response_length/mean" in text
    assert {path.name for path in (tmp_path / "out").glob("*.png")} == {
        "reward-a-b.png",
        "reward-a_b.png",
    }


def test_findings_come_first(tmp_path, capsys):
    run, quiet = tmp_path / "run", tmp_path / "quiet"
    for folder, aborted in ((run, 0.9), (quiet, 0.1)):
        data = {"response/aborted_ratio": aborted, "gdpo/format/mean": 0.5}
        write_metrics(folder, [{"step": step, "data": data} for step in range(1, 8)])
    text = write(build_page([run, quiet]), tmp_path / "out").read_text()
    found = "run: 90% of the responses are empty: their rollouts were aborted"
    assert text.count("of the responses are empty") == 1
    assert 0 < text.index(found) < text.index('<section id="summary">')
    assert "(steps 1 to 7)" in text and "Look in train.log for what" in text
    text = write(build_page([quiet]), tmp_path / "out").read_text()
    assert "Nothing in the metrics asks for attention" in text
    for folder, count in ((run, 1), (quiet, 0)):
        assert summary.main([str(folder)]) == 0
        assert capsys.readouterr().out.count("FINDING: 90% of the responses") == count


def test_the_summary_draws_the_same_curves(tmp_path, capsys):
    run = make_run(tmp_path / "run", steps=3)
    assert summary.main([str(run)]) == 0
    assert (run / "rewards.png").read_bytes().startswith(b"\x89PNG")
    assert f"reward curves  {run / 'rewards.png'}" in capsys.readouterr().out


SQUARE = {"g": [(0, 0), (0, 1), (1, 0), (1, 1)]}  # correctness and format do not depend


def square_run(folder, steps=8):
    """A run whose rollouts are `SQUARE`, with tokens 10, 11, 12, 13."""
    run = make_run(folder, steps=2)
    data = {
        **{"gdpo/correctness/share": 0.7, "gdpo/format/share": 0.3},
        **{"gdpo/correctness/varies": 0.5, "gdpo/format/varies": 0.02},
        **{"gdpo/format/at_high": 0.98, "gdpo/length_correlation": -0.4},
        "gdpo/no_signal": 0.0,
    }
    lengths = [40, *[20] * (steps - 1)]
    lines = [
        {"step": step, "data": {**data, "response_length/mean": length}}
        for step, length in enumerate(lengths, start=1)
    ]
    write_metrics(run, lines)
    (run / "rollouts" / "2.jsonl").write_text(rollout_dump(2, groups=SQUARE))
    return run


def test_what_follows_the_length(tmp_path):
    found = follow_length(read_arms([square_run(tmp_path / "run")])[0].runs[0])
    # tokens -1.5 -.5 .5 1.5 with -1 1 -1 1, and with -1 -1 1 1
    assert found == {
        "format": pytest.approx(2 / 20**0.5),
        "correctness": pytest.approx(4 / 20**0.5),
    }


def test_only_rewards_with_a_weight_follow_the_length(tmp_path):
    run = square_run(tmp_path / "run")
    config = run / "hydra" / ".hydra" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("rewards: null", "rewards: {format: -2.0, correctness: 0.0}"))
    [arm] = read_arms([run])
    assert follow_length(arm.runs[0]) == {"format": pytest.approx(-2 / 20**0.5)}
    (run / "rollouts" / "2.jsonl").unlink()
    assert follow_length(arm.runs[0]) == {}


def test_the_first_screen_answers_three_questions(tmp_path):
    page = build_page([square_run(tmp_path / "run")])
    answers = {section.anchor: section.answer for section in page.sections if section.answer}
    assert answers == {
        "influence": ["of the advantage, correctness 0.70, format 0.30"],
        "saturation": [
            "format differs in 2% of the groups (98% of the samples at its highest value), "
            "correctness differs in 50%"
        ],
        "length": [
            "40 tokens at first, 20 at the end; correlation with the advantage -0.40; of "
            "correctness alone 0.89, format alone 0.45"
        ],
    }
    text = write(page, tmp_path / "out").read_text()
    for anchor, lines in answers.items():
        assert f'<li><a href="#{anchor}">' in text and f'<section id="{anchor}">' in text
        assert text.index('id="findings"') < text.index(lines[0]) < text.index('id="summary"')


def test_answers_of_several_arms_and_of_none(tmp_path):
    runs = [square_run(tmp_path / "a"), make_run(tmp_path / "b", "grpo", steps=2)]
    write_metrics(runs[1], [{"step": 1, "data": {"gdpo/format/mean": 0.5}}])
    (runs[1] / "rollouts" / "2.jsonl").unlink()
    said = {section.anchor: section.answer for section in build_page(runs).sections}
    assert said["influence"] == ["gdpo: of the advantage, correctness 0.70, format 0.30"]
    said = {section.anchor: section.answer for section in build_page(runs[1:]).sections}
    assert said["influence"] == ["not known, because the metrics hold no gdpo/<reward>/share"]


def test_many_rewards_are_not_all_named():
    metrics = {step: {f"gdpo/r{i}/share": i / 10 for i in range(5)} for step in (1, 2)}
    section = influence([RunsOfArm("gdpo", [Run(Path("run"), metrics)])])
    assert section.answer == ["of the advantage, r4 0.40, r3 0.30, r2 0.20, and 2 more"]


def test_a_number_that_rounds_to_0_has_no_sign():
    assert [decimal(value) for value in (-0.004, 0.0, -0.4, 1.005)] == [
        *("0.00", "0.00", "-0.40", "1.00")
    ]
    panel = Panel("x", "step", "y", [Line("a", [1, 2], [-0.4, -0.004])])
    assert first_to_last(panel) == "a -0.40 to 0.00"


def test_a_chart_without_anything_to_see_is_a_sentence(tmp_path):
    page = build_page([square_run(tmp_path / "run")])
    [section] = [section for section in page.sections if section.anchor == "collapse"]
    assert "gdpo-no_signal" not in [chart.name for chart in section.charts]
    assert "Groups without a gradient: 0 at every step." in section.notes
    nothing = Chart("x", Panel("x", "step", "y", [Line("a", [1], [math.nan])]), "")
    zero = Chart("y", Panel("y", "step", "y", [Line("a", [1], [0.0])]), "")  # a reward of 0 is seen
    found = without_empty_charts(Section("s", "s", "", [nothing, zero]))
    assert (found.charts, found.notes) == ([zero], ["x: there is no finite number."])


def test_findings_beyond_the_first_can_be_opened(tmp_path):
    runs = [tmp_path / f"run{i}" for i in range(6)]
    for run in runs:
        data = {"response/aborted_ratio": 0.9, "gdpo/format/mean": 0.5}
        write_metrics(run, [{"step": step, "data": data} for step in range(1, 8)])
    text = write(build_page(runs), tmp_path / "out").read_text()
    assert text.count("of the responses are empty") == 6
    shown, more = text.split("<details><summary>2 more</summary>")
    assert shown.count("of the responses are empty") == 4
    assert more.index("run5: 90%") < more.index("</details>")


def test_commands_in_the_text_are_code_and_nothing_else_is_markup():
    assert with_code("see `a <b>` & c") == "see <code>a &lt;b&gt;</code> &amp; c"
