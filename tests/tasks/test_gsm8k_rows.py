"""GSM8K's rows: from its files, from upstream, and made from a seed."""

import json
import re

import pytest
from prepared_rows import prepare

from verl_gdpo.tasks.gsm8k.rows import make_rows
from verl_gdpo.tasks.gsm8k.score import TASK

PROBLEMS = [
    {"question": "How many?", "answer": "24 + 48 = <<24+48=72>>72.\nSo 72.\n#### 72"},
    {"question": "How many more?", "answer": "#### 1,080"},
]


def lines(problems):
    return "".join(json.dumps(problem) + "\n" for problem in problems)


def test_the_ground_truth_is_what_stands_after_the_mark(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(lines(PROBLEMS))
    (tmp_path / "b.jsonl").write_text(lines(PROBLEMS[:1]))
    files = ("--from", tmp_path / "a.jsonl", "--test", tmp_path / "b.jsonl")
    code, (train, test) = prepare("gsm8k", tmp_path, *files)
    assert code == 0 and len(test) == 1
    assert train == [
        {
            "data_source": "verl_gdpo/gsm8k",
            "prompt": [
                {"role": "system", "content": TASK.system_prompt},
                {"role": "user", "content": question},
            ],
            "ability": "gsm8k",
            "reward_model": {"style": "rule", "ground_truth": result},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, (question, result) in enumerate(
            [("How many?", "72"), ("How many more?", "1,080")]
        )
    ]


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        ({"question": "q", "answer": "72"}, "field answer: got '72'; expected a solution"),
        ({"question": "q", "answer": "x ####"}, "field reward_model.ground_truth: got ''"),
        ({"question": "q", "answer": 72}, "field answer: got 72; expected a str"),
        ({"question": " ", "answer": "#### 72"}, "field prompt[1].content: got ' '; expected some"),
        ({"problem": "q", "answer": "#### 72"}, "field question: got nothing"),
        ({"question": "q", "answer": "#### <answer>"}, "field reward_model.ground_truth: gsm8k"),
    ],
)
def test_a_bad_row_is_refused_with_file_row_and_field(tmp_path, capsys, problem, words):
    path = tmp_path / "a.jsonl"
    path.write_text(lines([PROBLEMS[0], problem]))
    assert prepare("gsm8k", tmp_path, "--from", path, "--test", path) == (1, [None, None])
    assert f"{path}, row 1, {words}" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_made_results_are_right_and_the_tests_pairs_are_new(split):
    kinds = {"digits": 0, "comma": 0}
    for row in make_rows(300, split=split, seed=1):
        question, gold = row["prompt"][1]["content"], row["reward_model"]["ground_truth"]
        first, second = (int(n.replace(",", "")) for n in re.findall(r"\d+(?:,\d+)?", question))
        result = first - second if "loses" in question else first + second
        assert gold == (f"{result:,}" if "May" in question else str(result)) and result >= 0
        kinds["comma" if "," in gold else "digits"] += 1
        unit = 1000 if "May" in question else 1
        assert ((first // unit) * (second // unit) % 4 == 3) == (split == "test")
    assert min(kinds.values()) > 50  # so that the reward integer varies
