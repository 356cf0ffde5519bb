"""Whether verl can join the data files of a run."""

import json

import datasets
import pyarrow as pa
import pytest
from omegaconf import OmegaConf
from run_config import run_config

from verl_gdpo.tools.check.data_files import DataFile, read_files
from verl_gdpo.tools.check.joined_files import columns_that_a_file_lacks, what_cannot_be_joined


def file_of(name, **columns):
    return DataFile(name, pa.table({key: [value] for key, value in columns.items()}))


A = file_of("a", prompt="x", extra_info={"index": 1}, reward_model={"ground_truth": "1"})


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"extra_info": {"index": "1"}}, ["extra_info.index is int64 in a and string in b"]),
        ({"extra_info": {"index": 1.0}}, ["extra_info.index is int64 in a and double in b"]),
        (
            {"reward_model": {"ground_truth": {"a": 1}}},
            ["reward_model.ground_truth is string in a and a struct in b"],
        ),
        (
            {"reward_model": {"ground_truth": ["1"]}},
            ["reward_model.ground_truth is string in a and a list in b"],
        ),
        (
            {"prompt": 1, "extra_info": {"index": "1"}},
            ["prompt is string in a and int64 in b", "extra_info.index is int64 in a and str"],
        ),
        ({"extra_info": {"index": None}}, []),
        ({"extra_info": {"more": 1}}, []),
        ({"extra_info": None}, []),
        ({"more": [[1.0]]}, []),
    ],
)
def test_types_that_differ_are_named_where_verl_cannot_join(other, said):
    """verl's own call decides, and what is said is not more than it refuses."""
    b = file_of("b", **other)
    refused = what_cannot_be_joined("train_files", [A, b])
    assert bool(refused) == bool(said)
    for text in said:
        assert text.replace("double", "float64") in refused[0]
    assert refused == [] or refused[0].startswith("data.train_files: verl cannot join the files: ")
    assert what_cannot_be_joined("train_files", [b]) == []


def test_lists_are_looked_into():
    a = file_of("a", prompt=[{"role": "user", "content": "x"}], calls=[[1]])
    b = file_of("b", prompt=[{"role": "user", "content": 1}], calls=[["1"]])
    [said] = what_cannot_be_joined("val_files", [a, b])
    assert "prompt[].content is string in a and int64 in b; calls[][] is int64 in a and" in said


def test_a_schema_that_datasets_cannot_read():
    features = {"prompt": {"dtype": "string", "_type": "Newer"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"prompt": ["x"]}).replace_schema_metadata(metadata)
    [said] = what_cannot_be_joined("train_files", [A, DataFile("b", table)])
    assert f"b: verl reads it with datasets {datasets.__version__}, which says: Feature" in said


def test_a_column_that_one_file_lacks():
    b = file_of("b", prompt="x", reward_model={"ground_truth": "1"}, hint="h")
    assert columns_that_a_file_lacks("train_files", [A, b, A]) == [
        "data.train_files: a has no hint, which b has: verl fills it with None",
        "data.train_files: b has no extra_info, which a has: verl fills it with None",
        "data.train_files: a has no hint, which b has: verl fills it with None",
    ]
    assert columns_that_a_file_lacks("train_files", [A]) == []


@pytest.mark.parametrize("prompt", [None, [{"role": "user", "content": "x"}, None]])
def test_a_null_in_the_place_of_a_message_is_named_with_its_row(tmp_path, prompt):
    good = {"prompt": [{"role": "user", "content": "x"}], "data_source": "s"}
    good["reward_model"] = {"ground_truth": "1"}
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(pa.Table.from_pylist([good, good, {**good, "prompt": prompt}]), path)
    config = OmegaConf.merge(
        run_config(), {"data": {"train_files": str(path), "prompt_key": "prompt"}}
    )
    with pytest.raises(ValueError, match=r"prompt of 1 of 3 rows is null, .* such as row 2\. verl"):
        read_files(config, "train_files")
