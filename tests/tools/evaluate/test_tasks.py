import json
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tool_rows import tool_row

from verl_gdpo.scoring.response import Response, Turn
from verl_gdpo.tasks import TASKS, sandbox
from verl_gdpo.tasks.coding.problem import Problem, good_response
from verl_gdpo.tasks.preparation import DataError
from verl_gdpo.tasks.preparation.prepared_files import write_parquets
from verl_gdpo.tasks.preparation.sources import make_row
from verl_gdpo.tasks.sandbox import machine
from verl_gdpo.tasks.tool_rl.form import render_answer
from verl_gdpo.tasks.tool_rl.system_message import (
    OUTPUT_HEADING,
    STEPS_HEADING,
    TOOLS_HEADING,
    TOOLS_LINE,
    in_call_format,
)
from verl_gdpo.tools.evaluate import bfcl
from verl_gdpo.tools.evaluate.benchmark import Answer
from verl_gdpo.tools.evaluate.dialogues import Record, start_all
from verl_gdpo.tools.evaluate.numbers import numbers
from verl_gdpo.tools.evaluate.policy import Policy
from verl_gdpo.tools.evaluate.results import problems_of
from verl_gdpo.tools.evaluate.tasks import benchmark_of, questions

BENCH = {name: benchmark_of(task) for name, task in TASKS.items()}


def asked(*data, config=None, step=0):
    of_config = Policy(Path(), Path(), config=config).of_config
    return Namespace(data=[*data], of_config=of_config, step=step, call_format=None)


def rows_of(task, *truths):
    return [
        {**make_row(TASKS[task], f"{k}?", truth), "extra_info": {"index": k, "split": "test"}}
        for k, truth in enumerate(truths)
    ]


def values(bench, options, *answers):
    """{column: value} for these answers (text, tokens), one a question; None is no answer."""
    found = BENCH[bench].questions(options)
    dialogues = start_all(found, 1)
    for one, answer in zip(dialogues, answers, strict=True):
        one.go_on(Record("", None if answer is None else Answer(*answer)))
    made = numbers(BENCH[bench].columns, [*problems_of(dialogues).values()])
    return {one.name: one.value for one in made if not one.name.startswith(" ")}


def test_tool_rl(tmp_path):
    rows = [tool_row(index, "test") for index in range(3)]
    write_parquets({tmp_path / "test.parquet": rows})
    right = rows[0]["reward_model"]["ground_truth"]
    # 3, and -3 for what cannot be read and for no answer
    found = values("tool_rl", asked(tmp_path), (right, 9), ("?", 1), None)
    assert found == {"correctness": pytest.approx(-1), "format": pytest.approx(1 / 3)}


def test_calls_in_the_format_of_the_model(tmp_path):
    """Without a run, the command names it; a run's own is replaced."""
    row = tool_row(0, "test")
    truth = render_answer("", [{"name": "f", "parameters": {"a": 1}}])
    row["reward_model"]["ground_truth"] = truth
    write_parquets({tmp_path / "test.parquet": [row]})
    good = TASKS["tool_rl"].good_response_of(truth, {"call_format": "hermes"})
    config = OmegaConf.create({"reward": {"reward_kwargs": {"call_format": "llama3_json"}}})
    for of_run in (None, config):
        options = asked(tmp_path, config=of_run)
        assert values("tool_rl", options, (good, 9)) != {"correctness": 3.0, "format": 1.0}
        options.call_format = "hermes"
        assert BENCH["tool_rl"].scorer(options)["call_format"] == "hermes"
        assert values("tool_rl", options, (good, 9)) == {"correctness": 3.0, "format": 1.0}
    options.call_format = "hermse"
    with pytest.raises(ValueError, match=r"call_format: .*'hermse'"):
        BENCH["tool_rl"].questions(options)
    for bench in (BENCH["gsm8k"], bfcl.BENCHMARK):
        with pytest.raises(ValueError, match=r"--call-format hermse: .*; leave it out"):
            bench.scorer(options)


def test_rows_in_toolrls_own_form_teach_the_format_of_the_run(tmp_path):
    """Those that data preparation wrote, in verl's form, teach what they say."""
    truth = render_answer("t", [{"name": "f", "parameters": {"a": 1}}])
    listed = f"1. Name: f\nDescription: d\nParameters: {{}}\n\n{STEPS_HEADING}s\n"
    system = f"{TOOLS_HEADING}{TOOLS_LINE}{listed}{OUTPUT_HEADING}o"
    (tmp_path / "a.json").write_text(
        json.dumps([{"instruction": system, "input": "q", "output": truth}])
    )
    prepared = tool_row(0, "test")
    (tmp_path / "b.json").write_text(json.dumps([prepared]))
    taught = in_call_format(system, "hermes")
    config = OmegaConf.create({"reward": {"reward_kwargs": {"call_format": "hermes"}}})
    for of_run, expected in ((None, system), (config, taught)):
        options = asked(tmp_path / "a.json", tmp_path / "b.json", config=of_run)
        contents = [one.start.args[0][0]["content"] for one in BENCH["tool_rl"].questions(options)]
        assert contents == [expected, prepared["prompt"][0]["content"]]


def test_gsm8k_and_constraints(tmp_path):
    path = tmp_path / "some.parquet"
    write_parquets({path: rows_of("gsm8k", "72", "1,080")})
    good = "<think> t </think>\n<answer>72</answer>"
    found = values("gsm8k", asked(path), (good, 9), ("<answer>1,080</answer>", 3))
    assert found == {"correctness": 1.0, "integer": 0.5, "format": 0.5}
    # a reward counts in the rows that have it
    write_parquets({path: rows_of("constraints", '{"keyword": ["old"]}', '{"ending": "!"}')})
    found = values("constraints", asked(path), ("old", 9), ("old", 9))
    assert (found["all met"], found["keyword"], found["ending"]) == (0.5, 1.0, 0.0)


def test_each_file_of_maths_is_a_data_set(tmp_path):
    items = [{"problem": f"What is {n}?", "answer": n} for n in (7, 8, 9)]
    (tmp_path / "amc.json").write_text(json.dumps(items[:2]))
    (tmp_path / "aime").mkdir()
    write_parquets({tmp_path / "aime" / "test.parquet": rows_of("math_length", "9")})
    options = asked(tmp_path / "aime", tmp_path / "amc.json")
    answers = [(r"\boxed{9}", 4001), (r"\boxed{7.0}", 4000), (r"\boxed{9}", 1)]
    found = BENCH["math_length"].questions(options)
    assert [question.key for question in found] == ["aime_0", "amc_0", "amc_1"]
    # the mean of both files: (1 + 1/2) / 2 and (1 + 0) / 2
    assert values("math_length", options, *answers) == {"accuracy": 0.75, "above the limit": 0.5}
    columns = BENCH["math_length"].columns(["aime", "amc"])
    assert [[part.name for part in column.parts] for column in columns] == [["aime", "amc"]] * 2


def test_two_files_with_one_name_are_refused(tmp_path):
    for name in "ab":
        write_parquets({tmp_path / name / "x.parquet": rows_of("gsm8k", "1")})
    with pytest.raises(ValueError, match="two files have the name 'x'"):
        BENCH["gsm8k"].questions(asked(tmp_path / "a/x.parquet", tmp_path / "b/x.parquet"))


def test_coding(tmp_path, monkeypatch):
    truth = Problem(None, [{"input": "1", "output": "2"}, {"input": "3", "output": "4"}]).text()
    rewards = {"a": (1.0, 1.0), "b": (0.5, 1.0), "c": (0.0, 0.0)}

    def score(response, ground_truth, *, response_tokens, length_needs_pass, max_tests, **_):
        assert ground_truth == truth and not length_needs_pass and max_tests > 10**6
        passed, bug = rewards.get(response, (0.0, 0.0))
        return {"pass": passed, "length": float(response_tokens <= 4000), "bug": bug}

    path = tmp_path / "t.parquet"
    write_parquets({path: rows_of("coding", *[truth] * 4)})
    task = replace(TASKS["coding"], score=score, missing=lambda **_: ())
    monkeypatch.setitem(BENCH, "coding", benchmark_of(task))
    found = values("coding", asked(path), ("a", 10), ("b", 4001), ("c", 9000), None)
    assert found == {"tests passed": 0.375, "solved": 0.25, "above the limit": 0.5, "bugs": 0.5}


def test_a_task_scores_what_it_scores_in_training(tmp_path):
    """The thought of an answer, and the tag that its prompt opens."""
    path = tmp_path / "t.parquet"
    write_parquets({path: rows_of("constraints", '{"keyword": ["old"]}')})
    thought = Response((Turn("old </think> new", given="<think>"),), 3)
    assert values("constraints", asked(path), ("old new", 3))["keyword"] == 1.0
    answer = ("old </think> new", 3, False, thought)
    assert values("constraints", asked(path), answer)["keyword"] == 0.0
    write_parquets({path: rows_of("gsm8k", "4")})
    text = "2 + 2</think>\n<answer>4</answer>"
    opened = Response((Turn(text, given="<think>"),), 9)
    assert values("gsm8k", asked(path), (text, 9, False, opened))["format"] == 1.0
    assert values("gsm8k", asked(path), (text, 9))["format"] == 0.0


def test_a_program_runs_in_the_sandbox(tmp_path):
    truth = Problem(None, [{"input": "1", "output": "1"}], solution="print(input())").text()
    path = tmp_path / "t.parquet"
    write_parquets({path: rows_of("coding", truth)})
    options = Namespace(**vars(asked(path)), coding_weak_sandbox=True)
    found = values("coding", options, (good_response(truth), 10))
    assert found == {"tests passed": 1.0, "solved": 1.0, "above the limit": 0.0, "bugs": 0.0}


@pytest.fixture
def weak_alone(monkeypatch):
    """Only a weak sandbox works on this machine."""
    every = machine.confinements
    monkeypatch.setattr(machine, "confinements", lambda weak: every(weak) if weak else [])
    sandbox._first_that_works.cache_clear()
    yield
    sandbox._first_that_works.cache_clear()


def test_solutions_run_in_the_weak_sandbox_too(tmp_path, weak_alone):
    problem = {"problem": "Print what you read.", "tests": [{"input": "1", "output": "1"}]}
    path = tmp_path / "problems.json"
    path.write_text(json.dumps([problem | {"solutions": ["print(2)", "print(input())"]}]))
    of_command = Namespace(**vars(asked(path)), coding_weak_sandbox=True)
    config = OmegaConf.create({"reward": {"reward_kwargs": {"weak_sandbox": True}}})
    for options in (of_command, asked(path, config=config)):
        [question] = BENCH["coding"].questions(options)
        assert json.loads(question.ground_truth)["solution"] == "print(input())"
    with pytest.raises(OSError, match="no sandbox for programs works"):
        BENCH["coding"].questions(asked(path))


def test_a_run_brings_its_rows_and_the_options_of_its_scorer(tmp_path):
    path = tmp_path / "rows.parquet"
    write_parquets({path: rows_of("gsm8k", "1,080")})
    answer = ("<answer>1080</answer>", 3)
    block = {"data": {"val_files": str(path)}, "reward": {"reward_kwargs": {}}}
    config = OmegaConf.create(block)
    assert values("gsm8k", asked(config=config), answer)["correctness"] == 0.0
    # `max_correctness` is of another task's scorer
    config.reward.reward_kwargs = {"normalize_numbers": True, "max_correctness": 1}
    assert values("gsm8k", asked(config=config), answer)["correctness"] == 1.0
    config.data.val_files = [str(path)]
    assert values("gsm8k", asked(config=config), answer)["correctness"] == 1.0


def test_a_run_with_a_list_brings_the_options_of_its_task():
    entry = {"task": "tool_rl", "call_format": "hermes"}
    config = OmegaConf.create({"reward": {"reward_functions": {"calls": entry}}})
    assert BENCH["tool_rl"].scorer(asked(config=config))["call_format"] == "hermes"


def test_a_run_on_several_tasks_brings_the_rows_of_one(tmp_path):
    path = tmp_path / "rows.parquet"
    write_parquets({path: [tool_row(0, "test"), *rows_of("gsm8k", "1")]})
    config = OmegaConf.create({"data": {"val_files": [str(path)]}})
    assert len(BENCH["gsm8k"].questions(asked(config=config))) == 1
    with pytest.raises(
        ValueError, match=r"no row of \('verl_gdpo/math_length',\).*pass --data FILE"
    ):
        BENCH["math_length"].questions(asked(config=config))


def test_two_results_have_to_share_the_options_of_the_scorer():
    config = OmegaConf.create({"reward": {"reward_kwargs": {"limit_tokens": 20, "seconds": 9.0}}})
    of_model, of_run = (BENCH["math_length"].scorer(asked(config=one)) for one in (None, config))
    assert (of_model["limit_tokens"], of_run["limit_tokens"]) == (4000, 20)
    assert of_model.keys() == of_run.keys()  # `seconds` is of another task
    assert BENCH["coding"].scorer(asked())["length_needs_pass"] is False


def test_a_scorer_gets_the_step_of_the_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "rows.parquet"
    write_parquets({path: [tool_row(0, "test")]})

    def score(response, truth, *, response_tokens=None, step=None):
        return {"correctness": step / 100, "format": 1.0}

    task = replace(TASKS["tool_rl"], score=score, bounds=lambda: score("", "", step=0))
    monkeypatch.setitem(
        BENCH, "tool_rl", replace(BENCH["tool_rl"], questions=partial(questions, task=task))
    )
    found = values("tool_rl", asked(path, step=75), ("", 9))
    assert found == {"correctness": pytest.approx(0.75), "format": 1.0}


def test_what_is_no_file_of_the_task_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--data FILE is needed.*verl-gdpo data math_length"):
        BENCH["math_length"].questions(asked())
    path = tmp_path / "rows.parquet"
    path.write_text("no parquet")
    with pytest.raises(DataError, match="no readable parquet"):
        BENCH["gsm8k"].questions(asked(path))
    with pytest.raises(OSError, match=r"nothing\.parquet"):
        BENCH["gsm8k"].questions(asked(tmp_path / "nothing.parquet"))
