import json

import pytest
from processes import completed
from scripted_policy import ScriptedPolicy
from tiny_chat_model import make_chat_model
from tool_rows import tool_row

from verl_gdpo.tasks.preparation.prepared_files import write_parquets
from verl_gdpo.tools import evaluate, replay
from verl_gdpo.tools.evaluate import engines
from verl_gdpo.tools.run_folder.dump_reader import read_dump, reward_rows

ROWS = [tool_row(index, "test") for index in range(4)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model and the rows of tool_rl."""
    folder = tmp_path_factory.mktemp("made")
    make_chat_model(folder / "model")
    write_parquets({folder / "rows" / "test.parquet": ROWS})
    return folder


@pytest.fixture
def run(made, tmp_path, monkeypatch):
    """Evaluates a scripted policy in the place of the model; returns the exit code."""

    def run(answer, *more, out="out", **engine):
        scripted = ScriptedPolicy(answer, **engine)
        monkeypatch.setattr(engines, "load_engine", lambda *_: scripted)
        given = [str(made / "model"), "--bench", "tool_rl", "--data", str(made / "rows")]
        return evaluate.main([*given, "--out", str(tmp_path / out), "--max-tokens", "50", *more])

    return run


def right(messages, seed):
    city = messages[-1]["content"].removeprefix("Weather in ").removesuffix("?")
    call = json.dumps({"name": "weather", "parameters": {"city": city}})
    return f"<think> look </think>\n<tool_call>\n{call}\n</tool_call>"


def right_in_oslo(messages, seed):
    return right(messages, seed) if "Oslo" in messages[-1]["content"] else "?"


def result(folder):
    return json.loads((folder / "result.json").read_text())


def test_a_scripted_policy_gets_its_table(run, tmp_path, capsys):
    assert run(right_in_oslo) == 0
    # correctness 3 in one of four and -3 in three; format 1 in one
    assert capsys.readouterr().out.splitlines()[:9] == [
        "",
        "              value   95 % interval  questions",
        "-----------  ------  --------------  ---------",
        "correctness  -1.500               -          4",
        "format        0.250  0.046 to 0.699          4",
        "",
        "pass@1 at temperature 0, of one policy: another training seed can end elsewhere.",
        "answers: 4, 0 of them cut at 50 tokens; 0 of 4 dialogues wrong because a prompt was "
        "too long for the model.",
        f"written to {tmp_path / 'out'}",
    ]
    found = result(tmp_path / "out")
    assert found["settings"]["temperature"] == 0 and found["settings"]["samples"] == 1
    assert found["settings"]["versions"].keys() == {"transformers", "torch"}


def test_samples_are_said_to_be_no_training_seeds(run, tmp_path, capsys):
    def sometimes(messages, seed):
        return right(messages, seed) if seed % 2 else "?"

    assert run(sometimes, "--samples", "8", "--temperature", "0.7") == 0
    assert "avg@8 at temperature 0.7, of one policy: another training" in capsys.readouterr().out
    rows = read_dump(tmp_path / "out" / "rollouts" / "0.jsonl")
    assert [row["group"] for row in rows] == [f"rows_{k}" for k in range(4) for _ in range(8)]
    mean = sum(row["rewards"]["format"] for row in rows) / 32
    assert result(tmp_path / "out")["numbers"][1]["value"] == pytest.approx(mean)
    assert 0 < mean < 1
    # and replay reads them
    rewards = reward_rows(rows, 0)
    assert len(rewards) == 32 and rewards.extra_info(0).keys() == {"correctness", "format"}
    assert rows[0]["output"] in (right(ROWS[0]["prompt"], 0), "?")
    assert rows[0]["gts"] == ROWS[0]["reward_model"]["ground_truth"]
    assert replay.main([str(tmp_path / "out")]) == 0
    assert "1 step, 32 samples" in capsys.readouterr().out


def test_cut_answers_and_long_prompts_are_counted(run, tmp_path, capsys):
    assert run(lambda *_: "word " * 60, positions=10_000, max_tokens=50) == 0
    assert result(tmp_path / "out")["cut"] == 4
    assert run(right, out="long", positions=51) == 0
    found = result(tmp_path / "long")
    assert found["too_long"] == 4 and found["answers"] == 0 and found["cut"] == 0
    assert "4 of 4 dialogues wrong because a prompt was too long" in capsys.readouterr().out
    assert [one["value"] for one in found["numbers"]] == [-3, 0]


def test_two_results_side_by_side(run, tmp_path, capsys):
    assert run(right_in_oslo, out="a") == 0 and run(right, out="b") == 0
    capsys.readouterr()
    assert evaluate.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b/result.json")]) == 0
    shown = capsys.readouterr().out
    # 3 less -1.5: 0 in Oslo and 6 in the three others
    line = next(line for line in shown.splitlines() if line.startswith("correctness"))
    assert line.split() == ["correctness", "-1.500", "3.000", "4.500", "-"]
    assert "WARNING" not in shown
    # and what else differs is said
    run(right_in_oslo, "--temperature", "0.5", out="b")
    assert evaluate.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "WARNING: temperature is 0.0 in 1, 0.5 in 2" in capsys.readouterr().out


def test_results_of_other_questions_are_not_compared(run, made, tmp_path, capsys):
    run(right, out="a")
    other_truth = {**ROWS[0], "reward_model": ROWS[1]["reward_model"]}
    for rows in (ROWS[:2], [other_truth, *ROWS[1:]]):
        write_parquets({tmp_path / "rows" / "test.parquet": rows})
        run(right, "--data", str(tmp_path / "rows"), out="b")
        assert evaluate.main(["--compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
        assert "with other questions than" in capsys.readouterr().err
    assert evaluate.main(["--compare", str(tmp_path / "a"), str(made)]) == 1
    assert "result.json: no result.json of" in capsys.readouterr().err


def test_a_real_model_is_evaluated_by_transformers(made, tmp_path, capsys):
    model, rows, out = (str(path) for path in (made / "model", made / "rows", tmp_path / "out"))
    command = [model, "--bench", "tool_rl", "--data", rows, "--out", out]
    assert evaluate.main([*command, "--max-tokens", "16"]) == 0
    first = result(tmp_path / "out")
    assert first["settings"]["engine"] == "transformers" and first["answers"] == 4
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"rollouts", "result.json"}
    assert evaluate.main([*command, "--max-tokens", "300", "--out", f"{out}2"]) == 1
    assert "--max-tokens 300: the model has 256 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected RUN_OR_MODEL and --bench NAME"),
        (["model", "--bench", "mmlu"], "invalid choice: 'mmlu'"),
        (["model", "--bench", "gsm8k", "--samples", "2"], "needs --temperature above 0"),
        (["model", "--bench", "gsm8k", "--temperature", "nan"], "a number from 0 to 100"),
        (["model", "--bench", "gsm8k", "--max-tokens", "-1"], "expected a whole number >= 1"),
        (["--compare", "one"], "--compare takes two results or more"),
    ],
)
def test_wrong_usage(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_the_help_loads_no_heavy_package():
    code = (
        "import sys\nfrom verl_gdpo.tools import evaluate\n"
        "try:\n    evaluate.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'verl', 'vllm', 'ray', 'pandas'} & {*sys.modules}\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = completed("-c", code)
    assert done.returncode == 0, done.stderr
    assert "  tool_rl     correctness, format" in done.stdout
