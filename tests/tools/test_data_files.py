"""What is said of the rows of a data file."""

import pyarrow as pa
from omegaconf import OmegaConf

from verl_gdpo.tools.check.data_files import DataFile, hardly_useful_rows

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
