"""What is said of the rows of a data file."""

import pyarrow as pa
import pytest
from byte_tokenizer import make_tokenizer
from omegaconf import OmegaConf

from verl_gdpo.tools.check.data_files import DataFile, hardly_useful_rows
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
