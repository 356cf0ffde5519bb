"""The maths task's rows: answers of every form, and rows made from a seed."""

import itertools
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_rows import prepare

from verl_gdpo.tasks.math_length.rows import make_rows
from verl_gdpo.tasks.math_length.score import INSTRUCTION


def prepared(folder, problems):
    """(exit code, rows) of a file a.json."""
    path = folder / "a.json"
    path.write_text(json.dumps(problems))
    code, (rows, _) = prepare("math_length", folder, "--from", path, "--test", path)
    return code, rows


def golds(rows):
    return [row["reward_model"]["ground_truth"] for row in rows]


numbers = itertools.count()


def problem(answer, **more):
    text = f" What is number {next(numbers)}? "
    return {"problem": text, "answer": answer, "solution": "...", "difficulty": 2.0, **more}


ANSWERS = [  # as in a file, as a ground truth
    ("7", "7"),
    (" \\frac{14}{3}\n", "\\frac{14}{3}"),
    (142.0, "142"),
    (4.5, "4.5"),
    (3, "3"),
    (10**400, f"1{400 * '0'}"),  # No float is that large.
    (["9.6\n"], "9.6"),
    (["$69$,$84$"], "69,84"),
    (["\\frac{1}{2}\n", "0.5"], "\\frac{1}{2}"),
    (["\\$32,348"], "\\$32,348"),
]


def test_answers_of_every_form(tmp_path, capsys):
    problems = [problem(answer) for answer, _ in ANSWERS]
    code, rows = prepared(tmp_path, problems)
    assert code == 0
    assert golds(rows) == [gold for _, gold in ANSWERS]
    said = capsys.readouterr().err
    assert "left out" not in said and "repaired" not in said
    question = problems[0]["problem"].strip()
    assert rows[0]["prompt"] == [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}]
    assert rows[0]["data_source"] == "verl_gdpo/math_length"


def test_problems_without_one_answer_are_left_out_and_named(tmp_path, capsys):
    without = {"problem": "What?"}
    empty = [problem(None), problem([None]), problem([]), problem(" "), problem("$$"), without]
    problems = [problem("1"), *empty, problem("2"), problem(["3", "4"])]
    code, rows = prepared(tmp_path, problems)
    assert code == 0
    said = capsys.readouterr().err
    assert "a.json: 6 x left out (no answer): row 1, 2, 3, 4, 5, 6\n" in said
    assert "a.json: 1 x left out (several answers that math-verify" in said
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (problem([["1"]]), "row 1, field answer: got [['1']]; expected a text"),
        (problem(float("nan")), "row 1, field answer: got nan"),
        (problem("{7"), "row 1, field answer: math_length ground truth: got '{7'"),
        (problem("\\text{}"), "row 1, field reward_model.ground_truth: math_length ground truth"),
        (problem("7", context="Read this first."), "row 1, field context: got 'Read this first.'"),
        ({"question": "q", "answer": "7"}, "row 1, field problem: got None; expected some text"),
        ("x", "row 1, the whole row: got 'x'; expected an object"),
    ],
)
def test_a_bad_row_is_refused_with_row_and_field(tmp_path, capsys, bad, words):
    assert prepared(tmp_path, [problem("7", context=None), bad]) == (1, None)
    assert f"{tmp_path}/a.json, {words}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_planted_spaced_gold_is_repaired_or_left_out(tmp_path, capsys):
    spaced = ["10\\,000", "5 000", "\\$1\\ 000\\,000", "3~000\u202f000 \\text{ m}"]
    spaced += [["7 000", "7000"]]
    unclear = ["12 34", "5\\,00", "1 000 00", "2 1/2", "10, 000", "1,\\,200"]
    right = ["\\dfrac 3 8", "10{,}000", "1,\\!080", "\\log_2 128", "100, 200", "0"]
    problems = [problem(answer) for answer in (*spaced, *unclear, *right)]
    code, rows = prepared(tmp_path, problems)
    assert code == 0
    repaired = ["10000", "5000", "\\$1000000", "3000000 \\text{ m}", "7000"]
    assert golds(rows) == [*repaired, *right]
    path, said = tmp_path / "a.json", capsys.readouterr().err.splitlines()
    assert f"{path}: 5 x repaired (thousands apart in the answer): row 0, 1, 2, 3, 4" in said
    side_by_side = "numbers side by side in the answer, which may be one or several"
    assert f"{path}: 4 x left out ({side_by_side}): row 5, 6, 7, 8" in said
    otherwise = "math-verify reads the answer otherwise than it is meant"
    assert f"{path}: 2 x left out ({otherwise}): row 9, 10" in said


def test_a_spaced_gold_of_a_parquet_file(tmp_path, capsys):
    rows = [{**row, "extra_info": {"index": 0}} for row in make_rows(2, split="train", seed=0)]
    files = ["--from", tmp_path / "a.parquet", "--test", tmp_path / "a.parquet"]
    for gold, expected in (("10\\,000", 0), ("12 34", 1)):
        rows[1]["reward_model"]["ground_truth"] = gold
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
        code, (found, _) = prepare("math_length", tmp_path, *files)
        assert (code, golds(found)[1]) == (expected, "10000")
    error = capsys.readouterr().err.splitlines()[-1]
    assert "row 1, field reward_model.ground_truth: math_length ground truth: got '12 34'" in error


@pytest.mark.parametrize("split", ["train", "test"])
def test_made_results_are_right_and_the_tests_pairs_are_new(split):
    for row in make_rows(100, split=split, seed=1):
        first, second = map(int, re.findall(r"\d+", row["prompt"][0]["content"]))
        assert row["reward_model"]["ground_truth"] == str(first + second)
        assert ((first + 2 * second) % 4 == 3) == (split == "test")
