"""`verl-gdpo evaluate --rewards FILE.py:FUNCTION --rows FILE`, on a scripted policy."""

import json
import re

import pandas as pd
import pytest
from scripted_policy import ScriptedPolicy
from tiny_chat_model import make_chat_model

from verl_gdpo.tools import evaluate
from verl_gdpo.tools.evaluate import engines
from verl_gdpo.tools.evaluate.own_rewards import OwnRewards
from verl_gdpo.tools.evaluate.policy import Policy

REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info, answer_str, bonus=0.0):
    assert extra_info["is_validation"] and extra_info["level"] == len(ground_truth)
    extra_info["level"] = None  # of its own copy
    return {
        "score": 1.0,
        "correct": float(ground_truth in answer_str) + bonus,
        "short": extra_info["generated_tokens"] / 10,
        "read": answer_str,
        "polite": 1.0 if data_source == "chat" else None,
    }

async def waits(solution_str, **_):
    return float(len(solution_str))

def broken(solution_str, **_):
    return {"nan": float("nan")} if solution_str == "2" else {"nan": 1.0}

def few(answer_str, ground_truth, prompt):
    assert prompt[0]["role"] == "user"
    return float(ground_truth in answer_str)

def forgets(solution_str, **_):
    return "five"
"""


def rows(count, source="sums"):
    return [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
            "extra_info": {"level": len(str(n + 1))},
        }
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "model"
    make_chat_model(folder)
    return folder


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Evaluates a policy that adds right up to 5; returns the exit code."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    pd.DataFrame(rows(8)).to_parquet(tmp_path / "test.parquet")

    def add(messages, seed):
        number = int(messages[-1]["content"].split()[2])
        return str(number + 1) if number < 5 else "?"

    def run(*more, function="compute_score", file="test.parquet", out="out"):
        monkeypatch.setattr(engines, "load_engine", lambda *_: ScriptedPolicy(add))
        given = ["--rewards", f"{tmp_path}/my_rewards.py:{function}", "--rows", tmp_path / file]
        words = [str(word) for word in (model, *given, "--out", tmp_path / out, *more)]
        return evaluate.main(words)

    return run


def test_every_number_of_the_function_is_a_column(run, tmp_path, capsys):
    assert run() == 0
    shown = capsys.readouterr().out
    # Wilson: 5 of 8 is 0.306 to 0.863
    assert "correct  0.625  0.306 to 0.863          8" in shown
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert [number["name"] for number in result["numbers"]] == ["correct", "short"]
    assert result["settings"]["scorer"] == {"rewards": f"{tmp_path}/my_rewards.py:compute_score"}


def test_data_sources_are_told_apart_and_compared(run, tmp_path, capsys):
    lines = [json.dumps(row) for row in [*rows(8), *rows(2, "chat")]]
    (tmp_path / "both.jsonl").write_text("\n".join(lines) + "\n")
    assert run(file="both.jsonl", out="a") == 0 and run(file="both.jsonl", out="b") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    # The mean of 5 of 8 and of 2 of 2; a reward that one source alone has is over its rows.
    values = {words[0]: words[1] for words in reversed(shown) if len(words) > 2}  # the first
    assert (values["correct"], values["sums"], values["chat"]) == ("0.812", "0.625", "1.000")
    assert ["polite", "1.000", "0.342", "to", "1.000", "2"] in shown
    assert evaluate.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    compared = capsys.readouterr().out
    (line,) = [line for line in compared.splitlines() if line.startswith("correct ")]
    assert line.split()[:4] == ["correct", "0.812", "0.812", "0.000"]
    assert "WARNING" not in compared


def test_files_of_one_name_are_told_apart_by_their_folders(run, tmp_path, capsys):
    """verl's own preparation writes `test.parquet` for each data set."""
    paths = []
    for name in ("sums", "chat"):
        folder = tmp_path / name
        folder.mkdir()
        pd.DataFrame(rows(2, name)).to_parquet(folder / "test.parquet")
        paths.append(folder / "test.parquet")
    assert run("--rows", *paths) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert list(result["problems"]) == [
        f"{name}/test.parquet_{number}" for name in ("sums", "chat") for number in (0, 1)
    ]
    assert run("--rows", paths[0], paths[0]) == 1
    error = capsys.readouterr().err
    assert f"--rows {paths[0]}: the file is named twice; name it once" in error


def test_a_function_gets_the_arguments_that_it_takes(run, capsys):
    assert run(function="few") == 0
    assert "acc  0.625" in capsys.readouterr().out


def test_a_function_that_waits_and_returns_a_number(run, tmp_path, capsys):
    assert run(function="waits") == 0
    assert "acc  1.000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", "test.parquet, row 1, 'nan' is nan; expected a finite number"),
        ("forgets", "ValueError for {folder}/test.parquet, row 0: it returned 'five'"),
        ("computescore", "no function 'computescore'; .* has \\['compute_score'"),
    ],
)
def test_wrong_functions_are_named(run, tmp_path, capsys, function, message):
    assert run(function=function) == 1
    error = capsys.readouterr().err
    assert error.startswith("verl-gdpo evaluate: ")
    if function != "computescore":
        assert message.format(folder=tmp_path) in error
    else:
        assert "no function 'computescore'" in error


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "there is no row"),
        ('[{"prompt": [], "data_source": "a"}]', "row 0: KeyError 'reward_model'; expected verl's"),
        ("no", "rows.json: got no readable JSON (Expecting value"),
        ('{"prompt": []}', "rows.json: got a JSON dict; expected a list of objects"),
    ],
)
def test_wrong_rows_are_named(run, tmp_path, capsys, content, message):
    (tmp_path / "rows.json").write_text(content)
    assert run(file="rows.json") == 1
    assert message in capsys.readouterr().err


def test_json_lines_end_at_line_feeds_alone(run, tmp_path, capsys):
    """A text may hold the other characters at which Python's `splitlines` cuts."""
    lines = []
    for row, mark in zip(rows(3), "\u2028\u0085\u2029", strict=True):
        row["prompt"][0]["content"] += f" Please{mark}"
        lines.append(json.dumps(row, ensure_ascii=False))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    assert run(file="rows.jsonl") == 0
    assert "correct  1.000" in capsys.readouterr().out
    (tmp_path / "rows.json").write_text(json.dumps(rows(3)), encoding="utf-8-sig")
    assert run(file="rows.json", out="b") == 0


def test_a_line_that_is_no_json_is_named(run, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows(1)[0]) + "\n\n{'a': 1}\n")
    assert run(file="rows.jsonl") == 1
    error = capsys.readouterr().err
    assert re.search(r"/rows\.jsonl, row 1: got no readable JSON \(Expecting .*in line 3\)", error)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nofile.py:f", "--rewards nofile.py: no such file"),
        ("nothing", "--rewards nothing: expected FILE.py:FUNCTION"),
        ("no.module:f", "--rewards pkg://no.module: cannot be imported"),
    ],
)
def test_a_missing_function_is_told_by_the_option_of_evaluate(model, capsys, function, message):
    assert evaluate.main([str(model), "--rewards", function, "--rows", "x.json"]) == 1
    error = capsys.readouterr().err
    assert message in error and "expected FILE.py:FUNCTION or MODULE:FUNCTION" in error
    # A task is refused here.
    assert "--scorer" not in error and "a task" not in error and "gsm8k" not in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model", "--rewards", "a.py:f", "--bench", "gsm8k"], "RUN_OR_MODEL and --rewards FILE"),
        (["model", "--bench", "gsm8k", "--rows", "a.parquet"], "--rows needs --rewards"),
        (["model", "--rewards", "a.py:f", "--data", "a.parquet"], "the rows for --rewards are --r"),
    ],
)
def test_wrong_usage(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_a_task_is_a_benchmark(run, tmp_path, capsys):
    assert evaluate.main([str(tmp_path), "--rewards", "gsm8k"]) == 1
    assert "--rewards gsm8k: it is a task; ask for it with --bench gsm8k" in capsys.readouterr().err


def test_a_run_brings_the_options_of_its_own_function(tmp_path):
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    own = OwnRewards(f"{tmp_path}/my_rewards.py:compute_score")

    def keywords(path):
        function = {"path": path, "name": "compute_score", "reward_kwargs": {"bonus": 2.0}}
        policy = Policy(tmp_path, tmp_path, config=None)
        assert policy.of_config("reward.custom_reward_function", {}) == {}

        class Options:
            @staticmethod
            def of_config(key, default):
                return function if key == "reward.custom_reward_function" else default

        return own.keywords(Options())

    assert keywords("elsewhere/my_rewards.py") == {"bonus": 2.0}
    assert keywords("other.py") == {}
    assert keywords(None) == {}
