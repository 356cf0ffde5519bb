"""The maths task's rows: answers of every form, and rows made from a seed."""

import json
import re

import pytest

from verl_gdpo.data_prep import schema
from verl_gdpo.data_prep.math_length_synthetic import make_rows
from verl_gdpo.rewards.math_length import INSTRUCTION
from verl_gdpo.tools.data import main


def prepare(tmp_path, capsys, problems):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(problems))
    files = ["--from", str(path), "--test", str(path), "--out", str(tmp_path / "out")]
    code = main(["math_length", *files])
    return path, code, capsys.readouterr()


def problem(answer, **more):
    return {"problem": " What? ", "answer": answer, "solution": "...", "difficulty": 2.0, **more}


ANSWERS = [  # as in a file, as a ground truth
    ("7", "7"),
    (" \\frac{14}{3}\n", "\\frac{14}{3}"),
    (142.0, "142"),
    (4.5, "4.5"),
    (3, "3"),
    (["9.6\n"], "9.6"),
    (["$69$,$84$"], "69,84"),
    (["\\$32,348"], "\\$32,348"),
]


def test_answers_of_every_form(tmp_path, capsys):
    _, code, _ = prepare(tmp_path, capsys, [problem(answer) for answer, _ in ANSWERS])
    assert code == 0
    rows = schema.read_parquet(tmp_path / "out" / "train.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [gold for _, gold in ANSWERS]
    assert rows[0]["prompt"] == [{"role": "user", "content": f"What?\n\n{INSTRUCTION}"}]
    assert rows[0]["data_source"] == "verl_gdpo/math_length"


def test_problems_without_an_answer_are_left_out_and_named(tmp_path, capsys):
    without = {"problem": "What?"}
    problems = [problem("1"), problem(None), problem("2"), without, problem([None])]
    path, code, printed = prepare(tmp_path, capsys, problems)
    assert code == 0
    assert f"{path}: left out 3 of 5 rows (no answer): row 1, 3, 4\n" in printed.err
    rows = schema.read_parquet(tmp_path / "out" / "train.parquet")
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (problem(["1", "2"]), "row 1, field answer: got ['1', '2']; expected a text"),
        (problem(True), "row 1, field answer: got True"),
        (problem(float("nan")), "row 1, field answer: got nan"),
        (problem(""), "row 1, field reward_model.ground_truth: got ''"),
        (problem("{7"), "row 1, field reward_model.ground_truth: math_length ground truth"),
        (problem("\\text{}"), "train row 1, field reward_model.ground_truth: math_length ground"),
        (problem("7", context="Read this first."), "row 1, field context: got 'Read this first.'"),
        ({"question": "q", "answer": "7"}, "row 1, field problem: got None; expected some text"),
        ({"problem": " ", "answer": "7"}, "row 1, field problem: got ' '"),
        ("x", "row 1, the whole row: got 'x'; expected an object"),
    ],
)
def test_a_bad_row_is_refused_with_row_and_field(tmp_path, capsys, bad, words):
    path, code, printed = prepare(tmp_path, capsys, [problem("7", context=None), bad])
    assert code == 1 and words in printed.err.splitlines()[-1]
    assert str(path) in printed.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_source_has_to_be_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["math_length", "--out", str(tmp_path)])
    assert "one of the arguments --from --synthetic is required" in capsys.readouterr().err


@pytest.mark.parametrize("split", ["train", "test"])
def test_made_results_are_right_and_the_tests_pairs_are_new(split):
    rows = make_rows(100, split=split, seed=1)
    for row in rows:
        first, second = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        assert row["reward_model"]["ground_truth"] == str(first + second)
        assert ((first + 2 * second) % 4 == 3) == (split == "test")
    assert make_rows(50, split=split, seed=1) == rows[:50]
    assert make_rows(50, split=split, seed=2) != rows[:50]
