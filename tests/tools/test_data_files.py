"""How a data file and a file of responses are read, and what is said of their rows."""

import json

import pandas as pd
import pyarrow as pa
import pytest
from byte_tokenizer import make_tokenizer
from omegaconf import OmegaConf

from verl_gdpo.tools.check import main
from verl_gdpo.tools.check.data_files import (
    DataFile,
    hardly_useful_rows,
    read_files,
    read_responses,
)
from verl_gdpo.tools.check.messages import MARKS, marks_of, rarely_meant
from verl_gdpo.tools.check.prompts import RunPrompts, tokenizer_of_run

CONFIG = OmegaConf.create({"data": {"prompt_key": "prompt"}})


def file_of(*prompts):
    rows = []
    for system, user in prompts:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        row = {"prompt": messages, "data_source": "s", "reward_model": {"ground_truth": "1"}}
        rows.append(row)
    return DataFile("a", pa.Table.from_pylist(rows))


# --- reading -------------------------------------------------------------------------------------


def read(path):
    """The table of a data file, as the check of a run without verl-gdpo reads it."""
    manager = {"source": "register", "name": "naive"}
    data = {"prompt_key": "prompt", "train_files": str(path)}
    config = OmegaConf.create({"data": data, "reward": {"reward_manager": manager}})
    [file] = read_files(config, "train_files")
    return file.table


def row_with(text):
    prompt = [{"role": "user", "content": text}]
    day = "2026-01-02 03:04:05"
    truth = {"ground_truth": "4"}
    return {"prompt": prompt, "data_source": "s", "reward_model": truth, "day": day}


@pytest.mark.parametrize("name", ["list.json", "list.jsonl"])
@pytest.mark.parametrize("before", ["", "\ufeff", "\n "])
def test_a_list_of_rows_is_read_as_verl_reads_it(tmp_path, name, before):
    rows = [row_with("2 + 2?"), row_with("3 + 1? \u2028 \n")]
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / name).write_text(before + json.dumps(rows, indent=1, ensure_ascii=False))
    table = read(tmp_path / name)
    assert table == read(lines) and table.num_rows == 2
    # As in JSON Lines, Arrow finds out what a text stands for.
    assert pa.types.is_timestamp(table.schema.field("day").type)


def test_a_row_may_be_longer_than_a_block_of_arrow(tmp_path):
    (tmp_path / "a.jsonl").write_text((json.dumps(row_with("x" * 3_000_000)) + "\n") * 3)
    assert read(tmp_path / "a.jsonl").num_rows == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2]", "it cannot be read: JSON parse"),
        ('[{"a": 1}', "it cannot be read: "),
        ("[]", "Empty"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=rf"data\.train_files: .*a\.json: .*{message}"):
        read(tmp_path / "a.json")


TRAINING = [DataFile("a", pa.Table.from_pylist([{"data_source": f"s{n}"} for n in range(4)]))]


def test_responses_belong_to_rows(tmp_path):
    """pandas stores whole numbers beside None as floats."""
    responses = [{"response": "x", "row": 3}, {"response": "y", "row": None}]
    pd.DataFrame(responses).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in responses))
    (tmp_path / "a.json").write_text(json.dumps(responses))
    for name in ("a.parquet", "a.jsonl", "a.json"):
        of_row, of_all = read_responses(tmp_path / name, TRAINING)
        assert (of_row[0].source, of_row[1], of_all) == ("s3", "x", (None, "y"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("resp.txt", "x", r"expected a file that ends in \.parquet, \.json, \.jsonl"),
        ("bad.jsonl", "no", "it cannot be read: JSON parse error: Invalid value"),
        ("bad.parquet", "no", "it cannot be read: "),
        ("gone.jsonl", None, "there is no such file"),
        ("far.jsonl", '{"response": "x", "row": 4}', "row: 0 to 3 if it belongs"),
        ("half.jsonl", '{"response": "x", "row": 1.5}', "row: 0 to 3 if it belongs"),
        ("true.jsonl", '{"response": "x", "row": true}', "row: 0 to 3 if it belongs"),
        ("name.jsonl", '{"response": "x", "row": "1"}', "row: 0 to 3 if it belongs"),
    ],
)
def test_what_are_no_responses_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"--responses .*/{name}: .*{message}"):
        read_responses(tmp_path / name, TRAINING)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--rows", "-1", "expected a whole number >= 1"),
        ("--rows", "0", "expected a whole number >= 1"),
        ("--seconds", "-1", "expected a number of seconds above 0"),
        ("--seconds", "nan", "expected a number of seconds above 0"),
        ("--seconds", "1e30", "expected a number of seconds above 0"),
        ("--seconds", "soon", "expected a number of seconds above 0"),
    ],
)
def test_values_of_options_that_are_refused(capsys, option, value, expected):
    with pytest.raises(SystemExit) as stopped:
        main([f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"argument {option}: got '{value}'; {expected}" in capsys.readouterr().err


# --- rows ----------------------------------------------------------------------------------------


def test_prompts_with_different_tools_are_not_the_same():
    """The tools of a row stand in its system message."""
    assert hardly_useful_rows(CONFIG, "x", [file_of(("tool 1", "go"), ("tool 2", "go"))]) == []
    [said] = hardly_useful_rows(CONFIG, "x", [file_of(("t", "go"), ("u", "go"), ("t", "go"))])
    assert said == "data.x: 1 of 3 prompts are the same as an earlier one, such as row 2 of a"


def test_a_prompt_is_empty_without_a_question():
    [said] = hardly_useful_rows(CONFIG, "x", [file_of(("tool 1", "go"), ("tool 2", " "))])
    assert said == "data.x: 1 of 2 prompts are empty, such as row 1 of a"


def file_of_messages(*prompts):
    """A file whose prompts are lists of (role, content)."""
    rows = []
    for prompt in prompts:
        messages = [{"role": role, "content": content} for role, content in prompt]
        rows.append({"prompt": messages, "data_source": "s"})
    return DataFile("a", pa.Table.from_pylist(rows))


ASKED = [("system", "Be brief."), ("user", "2 + 2?")]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ([*ASKED, ("assistant", "4")], "end with a message of the assistant, such as row 1 of a"),
        (
            [("human", "2 + 2?")],
            "have no message of the role user, such as row 1 of a, which has: ",
        ),
        ([("system", "2 + 2?")], "have no message of the role user"),
        ([*ASKED, ("system", "Be brief.")], "end with a message of the role system"),
        (
            [("user", "<|im_start|>user\n2 + 2?<|im_end|>")],
            "already, such as <|im_start|> in row 1",
        ),
        ([("user", "<s>[INST] 2 + 2? [/INST]")], "already, such as [INST] in row 1 of a"),
    ],
)
def test_messages_that_are_rarely_meant(odd, said):
    (remark,) = rarely_meant(CONFIG, "x", [file_of_messages(ASKED, odd)], MARKS)
    assert remark.startswith("data.x: 1 of 2 prompts ") and said in remark


@pytest.mark.parametrize(
    "prompt",
    [
        [("user", "2 + 2?")],
        [*ASKED, ("assistant", "4"), ("user", "And 3 + 3?")],  # an example, or a dialogue
        [*ASKED, ("assistant", "<tool_call>..."), ("tool", "4")],
        [("developer", "Be brief."), ("user", "2 + 2?")],
        [("system", "Think in <think>, call in <tool_call>."), ("user", "<image>What is <video>?")],
        [("user", "<|vision_start|><|image_pad|><|vision_end|> <b>What</b> is [this]?")],
        [],
    ],
)
def test_usual_messages(prompt):
    assert rarely_meant(CONFIG, "x", [file_of_messages(ASKED, prompt)], MARKS) == []


def test_parts_of_a_message_are_read():
    content = [{"type": "image"}, {"type": "text", "text": "<|user|> What is it?"}]
    row = {"prompt": [{"role": "user", "content": content}], "data_source": "s"}
    file = DataFile("a", pa.Table.from_pylist([row]))
    (remark,) = rarely_meant(CONFIG, "x", [file], MARKS)
    assert "such as <|user|> in row 0" in remark


def test_special_tokens_that_the_template_writes_are_marks(tmp_path):
    """Those of the run's own tokenizer; it has <eos> and <pad>."""
    template = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"
    make_tokenizer(tmp_path, template)
    config = OmegaConf.create({"data": {}, "actor_rollout_ref": {"model": {"path": str(tmp_path)}}})
    marks = marks_of(RunPrompts(tokenizer_of_run(config), config))
    assert marks == [*MARKS, "<eos>"]
