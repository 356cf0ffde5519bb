"""Each task reads its source as the hub has it, and rows for verl, from any kind of file."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepared_rows import prepare

from verl_gdpo.tasks import TASKS
from verl_gdpo.tasks.preparation.sources import Sources

CALL = '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {}}\n</tool_call>'
VERLS_TESTS = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})


def verls(source, question, ground_truth):
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": question}],
        "ability": "a",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": 7, "split": "train"},
    }


# (task, rows of its source, the ground truths that they become)
FORMS = {
    "gsm8k": (
        "gsm8k",
        [
            {"question": "How many?", "answer": "24 + 48 = <<24+48=72>>72.\n#### 72"},
            {"question": "How many more?", "answer": "#### 1,080"},
        ],
        ["72", "1,080"],
    ),
    "ToolRL's JSON": (
        "tool_rl",
        [{"instruction": "s", "input": f"question {n}", "output": CALL} for n in range(2)],
        [CALL, CALL],
    ),
    "ToolRL's rows for verl": (
        "tool_rl",
        [
            {
                **verls("rlla", "What is new?", CALL),
                "extra_info": {
                    "index": 7,
                    "split": "train",
                    "instruction": "s",
                    "input": "i",
                    "output": "o",
                },
            }
        ],
        [CALL],
    ),
    "DeepScaleR": (
        "math_length",
        [
            {"problem": "What is 1 + 1?", "answer": "2", "solution": "It is 2."},
            {"problem": "What is 1 + 2?", "answer": "3", "solution": None},
        ],
        ["2", "3"],
    ),
    "OlympiadBench": (
        "math_length",
        [{"problem": "What is 1 + 1?", "answer": ["2"], "context": None, "unit": None}],
        ["2"],
    ),
    "constraints": (
        "constraints",
        [{"question": "Use the word old.", "answer": '{"keyword": ["old"]}'}],
        ['{"keyword": ["old"]}'],
    ),
    "rllm's lists": (
        "coding",
        [
            {"problem": "Add.", "tests": [{"input": "1", "output": "2"}], "solutions": None},
            {"problem": "Subtract.", "tests": [{"input": "1", "output": "0"}], "solutions": None},
        ],
        [
            '{"function": null, "tests": [{"input": "1", "output": "2"}]}',
            '{"function": null, "tests": [{"input": "1", "output": "0"}]}',
        ],
    ),
    "rllm's objects": (
        "coding",
        [
            {"problem": "Add.", "tests": {"functional": None, "inputs": ["1"], "outputs": ["2"]}},
            {
                "problem": "Write f.",
                "tests": {
                    "functional": "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(f)",
                    "inputs": None,
                    "outputs": None,
                },
            },
        ],
        [
            '{"function": null, "tests": [{"input": "1", "output": "2"}]}',
            '{"function": "f", "tests": [{"args": [1], "kwargs": {}, "accepted": [2]}]}',
        ],
    ),
    "DeepCoder": (
        "coding",
        [
            {
                "problem": "Add.",
                "tests": '[{"type": "stdin_stdout", "input": "1", "output": "2"}]',
                "solutions": ["print(2)"],
            }
        ],
        ['{"function": null, "tests": [{"input": "1", "output": "2"}], "solution": "print(2)"}'],
    ),
    "Eurus-2-RL": (
        "coding",
        [verls("taco", "Add.", VERLS_TESTS), verls("numina_math", "What is 1 + 1?", "2")],
        ['{"function": null, "tests": [{"input": "1\\n", "output": "2\\n"}]}'],
    ),
}


def written(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
@pytest.mark.parametrize("form", FORMS)
def test_a_source_is_read_as_it_is_published(tmp_path, form, suffix):
    task, rows, truths = FORMS[form]
    path = written(tmp_path / f"train{suffix}", rows)
    code, (train, test) = prepare(task, tmp_path, "--from", path, "--test", path)
    assert code == 0
    for split, made in (("train", train), ("test", test)):
        assert [row["reward_model"]["ground_truth"] for row in made] == truths
        assert [row["extra_info"] for row in made] == [
            {"index": index, "split": split} for index in range(len(truths))
        ]


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
@pytest.mark.parametrize("task", ["gsm8k", "tool_rl", "math_length", "constraints", "coding"])
def test_our_own_rows_come_back_from_any_kind_of_file(tmp_path, task, suffix):
    _, (train, _) = prepare(task, tmp_path, "--synthetic", 3)
    path = written(tmp_path / f"again{suffix}", train)
    assert prepare(task, tmp_path, "--from", path, "--test", path, "--force")[1][0] == train


def test_a_prompt_alone_makes_no_row_of_verls():
    """A source of a task of another distribution may have such a key."""
    sources = Sources(TASKS["gsm8k"], lambda item, _: {"made of": item["prompt"]})
    assert sources.row({"prompt": "How many?"}, print) == {"made of": "How many?"}


@pytest.mark.parametrize(
    "test",
    [
        {"type": "function_call", "fn_name": "f", "input": "1", "output": "2"},
        {"testtype": "functional", "input": "1", "output": "2"},
    ],
)
def test_a_call_in_a_list_is_no_test_of_a_program(tmp_path, capsys, test):
    """It would be fed to a program that reads its input."""
    tests = json.dumps([test, {"input": "1", "output": "2"}])
    path = written(tmp_path / "a.jsonl", [{"problem": "Add.", "tests": tests}])
    _, (train, _) = prepare("coding", tmp_path, "--from", path, "--test", path)
    truth = json.loads(train[0]["reward_model"]["ground_truth"])
    assert truth["tests"] == [{"input": "1", "output": "2"}]
    said = "1 x left out, of the tests (a test of a list that calls a function): row"
    assert said in capsys.readouterr().err
