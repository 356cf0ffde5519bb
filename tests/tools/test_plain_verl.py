"""`replay`, `report` and `summary` on what a plain verl command left, without verl-gdpo."""

import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import plain_verl_archive
import pytest
from omegaconf import OmegaConf
from processes import completed
from run_folder_writer import make_run, rollout_dump

from verl_gdpo.algorithm.settings import GdpoSettings
from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.tool_rl.form import render_answer
from verl_gdpo.terminal import install_line
from verl_gdpo.tools import replay, report, summary
from verl_gdpo.tools.replay.arms import Arm
from verl_gdpo.tools.replay.comparison import OF_SCORE, Replay
from verl_gdpo.tools.report import examples
from verl_gdpo.tools.report.page import build_page
from verl_gdpo.tools.report.runs import read_arms
from verl_gdpo.tools.run_folder.dump_reader import DUMPS_READ, Scorer, dump_files, read_dump
from verl_gdpo.tools.run_folder.tracker_logs import read_logged

DUMP = {"input": "2 + 2?", "output": "4", "gts": "4", "score": 1.0, "step": 1}


@pytest.fixture
def plain(tmp_path, monkeypatch):
    """The folder in which verl was started, as the current one."""
    monkeypatch.chdir(plain_verl_archive.unpack(tmp_path))
    return tmp_path


# --- replay --------------------------------------------------------------------------------------


def test_the_reference_is_what_the_run_trained_on(plain):
    """verl logged the ends of the advantages of its own grpo, over all tokens of the step."""
    scorer = Scorer.of(plain_verl_archive.SCORER)
    own = Arm("run", {"adv_estimator": "grpo"}, {})
    done = Replay(own, [Arm("gdpo", {"adv_estimator": "gdpo"}, {})], scorer=scorer)
    done.read(dump_files(plain / plain_verl_archive.DUMPS)[0])
    logged = read_logged(plain_verl_archive.METRICS).metrics
    for step in done.steps:
        A_B = step.columns[OF_SCORE].A_B
        assert len(A_B) == 192  # and 64 rows of padding, which no key marks
        for end in (min, max):
            expected = logged[step.number][f"critic/advantages/{end.__name__}"]
            assert end(A_B) == pytest.approx(expected, abs=1e-5)
    assert (done.rescored.rollouts, done.rescored.same, done.rescored.not_the_sum) == (384, 384, 0)


def test_replay_of_a_plain_run(plain, capsys):
    config = next(plain.glob("outputs/*/*"))  # Hydra's folder
    arguments = [plain_verl_archive.DUMPS, "--scorer", plain_verl_archive.SCORER]
    assert replay.main([*arguments, "--config", str(config)]) == 0
    out = capsys.readouterr().out
    assert "2 steps, 384 samples" in out
    assert "compared with verl's grpo on the dumped score." in out
    assert "--scorer gives the dumped score in 384 of 384 samples." in out


def other_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": 9.0, "layout": 1.0 * len(solution_str), "note": "text"}


async def bare_number(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


def needs_a_length(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["response_tokens"])


def needs_a_source(data_source, solution_str, ground_truth, extra_info):
    return {"math": 1.0}[data_source]


def returns_nothing(data_source, solution_str, ground_truth, extra_info):
    return None


MODULE = """
from __future__ import annotations

from dataclasses import asdict, dataclass

from its_helper import MOST

@dataclass
class Reward:
    short: float

def whole(data_source, solution_str, ground_truth, extra_info):
    return asdict(Reward(float(len(solution_str) < MOST)))
"""


def test_another_scorer_is_compared_and_said(plain, capsys):
    assert replay.main([plain_verl_archive.DUMPS, "--scorer", f"{__name__}:other_score"]) == 0
    out = capsys.readouterr().out
    assert "dumped score in 0 of 384 samples. WARNING" in out
    assert "in 384 samples its `score` is not the sum of its rewards" in out
    assert replay.main([plain_verl_archive.DUMPS, "--scorer", f"{__name__}:bare_number"]) == 0
    assert " acc " in capsys.readouterr().out
    source = ["--scorer", f"{__name__}:needs_a_source", "--data-source", "math"]
    assert replay.main([plain_verl_archive.DUMPS, *source]) == 0


def test_a_scorers_file_is_a_module(plain, tmp_path, capsys):
    (tmp_path / "its_helper.py").write_text("MOST = 3\n")
    path = tmp_path / "module_rewards.py"
    path.write_text(MODULE)
    assert replay.main([plain_verl_archive.DUMPS, "--scorer", f"{path}:whole"]) == 0
    assert " short " in capsys.readouterr().out
    assert pickle.loads(pickle.dumps(sys.modules["module_rewards"].Reward(1)))


@pytest.mark.parametrize(
    ("scorer", "more", "message"),
    [
        (None, [], "dumps/1.jsonl: one summed score .*--scorer FILE.py:FUNCTION"),
        ("", [], "dumps/1.jsonl: one summed score"),
        ("nothing", [], "--scorer nothing: expected FILE.py:FUNCTION .*gsm8k"),
        ("nowhere.py:f", [], "nowhere.py: no such file"),
        ("my_rewards.py:f", [], r"no function 'f'; my_rewards.py has .*'compute_score'"),
        ("my_rewards:compute_score", [], "cannot be imported.*expected FILE.py:FUNCTION"),
        (f"{__name__}:needs_a_length", [], "line 1: .*raised KeyError: 'response_tokens'. A dump"),
        (f"{__name__}:needs_a_source", [], r"raised KeyError: None.*data_source=None \(--data"),
        (f"{__name__}:returns_nothing", [], "returned None; expected a number or"),
        ("math_length", [], "TypeError: math_length response_tokens: .* cannot have more"),
        (plain_verl_archive.SCORER, ["--arm", "gdpo_token"], "gdpo_token normalises over tokens"),
    ],
)
def test_what_replay_refuses_of_a_plain_dump(plain, capsys, scorer, more, message):
    named = [] if scorer is None else ["--scorer", scorer]
    assert replay.main([plain_verl_archive.DUMPS, *named, *more]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("uid", "message"),
    [
        (None, "1.jsonl, line 1: no `uid`: .*use_v1=True"),
        ("a", "1.jsonl, line 1: key 'a': expected UID_SESSION_INDEX"),
    ],
)
def test_a_dump_without_groups_is_refused(tmp_path, capsys, uid, message):
    """verl's legacy trainer writes no uid."""
    row = DUMP if uid is None else {**DUMP, "uid": uid}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    assert replay.main([str(tmp_path), "--scorer", f"{__name__}:bare_number"]) == 1
    assert re.search(message, capsys.readouterr().err)


def of_parts(data_source, solution_str, ground_truth, extra_info, answer_str, reasoning_str):
    assert (solution_str, answer_str, reasoning_str) == ("x", "4", "a")
    return float(extra_info["generated_tokens"])


def test_a_scorer_sees_what_the_run_scored(tmp_path):
    kept = {"turns": [["<think>", "a</think>4"]], "generated_tokens": 3}
    row = {**DUMP, "uid": "u_0_0", "output": "x", "response_tokens": 9, "as_scored": kept}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    (scored,) = read_dump(tmp_path / "1.jsonl", Scorer.of(f"{__name__}:of_parts"))
    assert scored["rewards"]["acc"] == 3.0
    row["gts"] = '{"keyword": ["4"], "words": [1, 1]}'
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    (scored,) = read_dump(tmp_path / "1.jsonl", Scorer.of("constraints"))
    assert (scored["rewards"]["keyword"], scored["rewards"]["words"]) == (1.0, 1.0)


def of_two(answer_str, ground_truth):
    return float(ground_truth in answer_str)


def test_a_scorer_gets_the_arguments_that_it_takes(tmp_path):
    row = {**DUMP, "uid": "u_0_0", "gts": "4", "output": "it is 4"}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n")
    (scored,) = read_dump(tmp_path / "1.jsonl", Scorer.of(f"{__name__}:of_two"))
    assert scored["rewards"]["acc"] == 1.0


def within(solution_str, limit=5):
    return float(len(solution_str) <= limit)


HERMES = {"reward_kwargs": {"call_format": "hermes"}}
LISTED_TASK = {"reward_functions": {"calls": {"task": "tool_rl", "call_format": "hermes"}}}
WITHIN = {"path": f"pkg://{__name__}", "name": "within"}
SINGLE = {"custom_reward_function": {**WITHIN, "reward_kwargs": {"limit": 100}}}
LISTED = {"reward_functions": {"short": {**WITHIN, "limit": 100}}}


@pytest.mark.parametrize(
    ("scorer", "reward", "score"),
    [
        ("tool_rl", HERMES, 4.0),
        ("tool_rl", LISTED_TASK, 4.0),
        (f"{__name__}:within", SINGLE, 1.0),
        (f"{__name__}:within", LISTED, 1.0),
    ],
)
def test_a_scorer_has_the_options_of_the_run(tmp_path, capsys, scorer, reward, score):
    truth = render_answer("", [{"name": "f", "parameters": {"a": 1}}])
    good = TASKS["tool_rl"].good_response_of(truth, {"call_format": "hermes"})
    lines = []
    for session in range(2):
        row = {**DUMP, "uid": f"u_{session}_0", "output": good, "gts": truth, "score": score}
        lines.append(json.dumps(row) + "\n")
    run = make_run(tmp_path / "run", steps=3)
    (run / "rollouts" / "3.jsonl").write_text("".join(lines))
    place = run / "hydra" / ".hydra" / "config.yaml"
    config = OmegaConf.load(place)
    OmegaConf.update(config, "reward", reward, merge=True, force_add=True)
    OmegaConf.save(config, place)

    assert replay.main([str(run), "--scorer", scorer]) == 0
    out = capsys.readouterr().out
    assert "--scorer gives the dumped score in 2 of 2 samples." in out
    assert "--scorer has the options of the run's configuration: {" in out
    [arm] = read_arms([run], scorer=Scorer.of(scorer))
    [of_report] = arm.runs
    read = examples.read_step(run / "rollouts" / "3.jsonl", of_report, GdpoSettings())
    assert [row["scorer_score"] for row in read.dump] == [score, score]


def test_a_scorer_that_refuses_the_options_of_the_run_is_told_with_them():
    row = {**DUMP, "uid": "u_0_0"}
    reward = {"custom_reward_function": {**WITHIN, "reward_kwargs": {"limits": 9}}}
    scorer = Scorer.of(f"{__name__}:within").with_options_of(OmegaConf.create({"reward": reward}))
    with pytest.raises(ValueError, match=r"argument 'limits'.*the options {'limits': 9}"):
        scorer.rewards(row, "s")


def test_our_dumps_can_be_scored_again(tmp_path, capsys):
    """What the run trained on stays what the arms are compared with."""
    run = make_run(tmp_path / "run", steps=2)
    (dump,) = (run / "rollouts").iterdir()
    rows = read_dump(dump, Scorer.of(f"{__name__}:needs_a_length"))
    assert [row["rewards"]["acc"] for row in rows] == [row["response_tokens"] for row in rows]
    assert replay.main([str(run), "--scorer", f"{__name__}:bare_number"]) == 0
    out = capsys.readouterr().out
    assert "are not recomputed (--scorer has other rewards)" in out
    assert "Where logged and grpo differ most" in out


def test_a_mixed_folder_is_refused(plain, capsys):
    (plain / plain_verl_archive.DUMPS / "11.jsonl").write_text(rollout_dump(11))
    assert replay.main([plain_verl_archive.DUMPS, "--scorer", f"{__name__}:bare_number"]) == 1
    assert "some dumps hold advantages and some do not" in capsys.readouterr().err


# --- report and summary --------------------------------------------------------------------------


def test_a_configuration_says_where_the_dumps_are(plain):
    config = next(plain.glob("outputs/*/*/.hydra/config.yaml"))
    [arm] = read_arms([plain_verl_archive.TENSORBOARD], [config])
    assert len(arm.runs[0].dumps()) == 2


def test_the_report_of_a_plain_run(plain, capsys):
    more = ["--config", str(next(plain.glob("outputs/*/*"))), "--scorer", plain_verl_archive.SCORER]
    assert report.main([plain_verl_archive.METRICS, *more]) == 0
    index = plain / "report" / "index.html"
    assert capsys.readouterr().out.strip() == "report/index.html"
    text = index.read_text()
    assert "<h1>grpo_baseline</h1>" in text
    titles = re.findall('<span class="strong">([^<]+)</span> <span class="soft">', text)
    assert {"score", "layout", "Response length"} <= {*titles}
    assert "No problem found in 10 steps; most rules need" in text
    assert "The rewards of grpo_baseline were not looked at one by one" in text
    assert "where GDPO and GRPO differ most" in text
    assert "&lt;tool_call&gt;" in text and ">trained<" not in text


def test_a_report_without_a_scorer_says_how_to_have_examples(plain):
    page = build_page([plain_verl_archive.METRICS], (), [plain / plain_verl_archive.DUMPS])
    (said,) = page.examples.values()
    assert re.search("dumps/10.jsonl, line 1: one summed score .*--scorer FILE", said)


def test_a_configuration_for_each_run(plain):
    with pytest.raises(ValueError, match="--config: expected once for each of 2 runs"):
        read_arms([plain_verl_archive.METRICS, plain_verl_archive.TENSORBOARD], [plain])
    with pytest.raises(ValueError, match=r"no `algorithm` block; expected .hydra"):
        read_arms([plain_verl_archive.METRICS], [plain / "plain"])


def test_seeds_of_plain_runs_pool(tmp_path, capsys, monkeypatch):
    """By their configurations without seeds and names, or as the user says."""
    monkeypatch.chdir(tmp_path)
    made = [("grpo", 1, 1e-6), ("gdpo", 1, 1e-6), ("grpo", 2, 1e-6), ("gdpo", 2, 1e-6)]
    made += [("grpo", 3, 1e-5)]
    runs, configs = [], []
    for number, (estimator, seed, rate) in enumerate(made):
        config = {"algorithm": {"adv_estimator": estimator}, "data": {"seed": seed}, "lr": rate}
        config["trainer"] = {"experiment_name": f"try {number}"}
        runs.append(Path(f"{number}.jsonl"))
        configs.append(Path(f"{number}.yaml"))
        line = {"step": 1, "data": {"critic/score/mean": 0.5}}
        runs[-1].write_text(json.dumps(line) + "\n")
        configs[-1].write_text(json.dumps(config))
    arms = read_arms(runs, configs)
    assert {arm.name: [run.name for run in arm.runs] for arm in arms} == {
        "grpo": ["0", "2"],
        "gdpo": ["1", "3"],
        "4": ["4"],  # alone, it has its own name
    }
    assert report.main(["--arm", "mine=0.jsonl,4.jsonl", "--arm", "other=1.jsonl"]) == 0
    text = Path("report/index.html").read_text()
    assert "<h1>mine, other</h1>" in text
    assert '<td class="word">mine</td>\n<td>2</td>' in text  # two runs of this arm
    with pytest.raises(SystemExit):
        report.main(["--arm", "mine="])
    assert "expected NAME=RUN,RUN" in capsys.readouterr().err


def test_what_a_configuration_lacks(plain):
    """Its folder of dumps may be away."""
    (plain / "away.yaml").write_text("algorithm: {}\ntrainer: {rollout_data_dir: /away}\n")
    [arm] = read_arms([plain_verl_archive.METRICS], [plain / "away.yaml"])
    with pytest.raises(ValueError, match="no dump: train with trainer"):
        arm.runs[0].dumps()
    with pytest.raises(ValueError, match="plain: no dump"):
        read_arms([plain_verl_archive.METRICS], (), [plain / "plain"])


def test_the_summary_for_a_script(plain, capsys):
    assert summary.main([plain_verl_archive.METRICS, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["run"], record["last_step"], record["findings"]) == ("grpo_baseline", 10, [])
    assert record["rewards"]["score"]["last step"] == pytest.approx(2.158, abs=1e-3)
    lines = Path(plain_verl_archive.METRICS).read_text().splitlines()
    for end, code in ((40, 3), (60, 0)):  # broken until the end, and healthy again
        with Path("broken.jsonl").open("w") as file:
            for step in range(1, 61):
                data = json.loads(lines[5])["data"]
                data |= {"actor/grad_norm": 1e6} if 30 <= step <= 40 else {}
                data |= {"critic/score/min": None} if step == 20 else {}
                if step <= end:
                    print(json.dumps({"step": step, "data": data}), file=file)
        assert summary.main(["broken.jsonl", "--json"]) == code
        record = json.loads(capsys.readouterr().out)
        expected = [("gradient", 30, 40, code == 0), ("no number", 20, 20, True)]
        keys = ("topic", "first", "last", "is_over")
        assert [tuple(each[key] for key in keys) for each in record["findings"]] == expected
    assert summary.main(["nowhere", "--json"]) == 1


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from verl_gdpo.__main__ import main
sys.argv = ["verl-gdpo", *sys.argv[1:]]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("missing", "command", "message"),
    [
        ("jinja2", "report", f"report: jinja2 is not installed: {install_line('plots')}"),
        ("tensorboard", "summary", "needs tensorboard: pip install tensorboard"),
        ("torch", "replay", f"replay: torch is not installed: {install_line('verl')}"),
        ("hydra", "check", f"check: hydra is not installed: {install_line('verl')}"),
    ],
)
def test_what_is_not_installed_is_asked_for_in_a_line(plain, missing, command, message):
    source = (
        plain_verl_archive.TENSORBOARD if missing == "tensorboard" else plain_verl_archive.METRICS
    )
    program = WITHOUT.format(missing=[missing])
    done = completed("-c", program, command, source)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert message in done.stderr


def test_a_report_reads_a_bounded_number_of_dumps_without_their_texts(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", steps=3)
    for step in range(1, 101):
        (run / "rollouts" / f"{step}.jsonl").write_text(rollout_dump(step))
    read, texts = [], []

    def watched(path, *arguments, **options):
        rows = read_dump(path, *arguments, **options)
        read.append(int(path.stem))
        assert not any("output" in row for row in rows)
        return rows

    def watched_texts(path, numbers):
        texts.append(numbers)
        return real_texts(path, numbers)

    real_texts = examples.read_texts
    monkeypatch.setattr(examples, "read_dump", watched)
    monkeypatch.setattr(examples, "read_texts", watched_texts)
    [arm] = read_arms([run])
    groups = examples.example_groups(arm.runs[0])
    assert len(read) == DUMPS_READ == 20
    assert (read[0], read[-1]) == (100, 1) and np.diff(read).min() >= -6  # evenly
    assert [len(numbers) for numbers in texts] == [4] * len(groups)
    assert all(rollout.output.startswith("answer") for g in groups for rollout in g.rollouts)
