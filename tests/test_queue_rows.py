"""What is read out of TransferQueue, with the three kinds of columns that it hands back."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from transfer_queue import KVBatchMeta

from verl_gdpo import queue_rows

KEYS = ["u_0_0", "u_1_0", "v_0_0", "pad_0_0"]
TAGS = [{"response_len": n, "is_padding": n == 1} for n in (4, 3, 2, 1)]
INFOS = [{"a": 1.0, "score": 1.0}, {"a": None, "score": 0.0}, {"a": 3.0, "b": 2.0}, {"a": 1.0}]
EXTRA = [{"reward_extra_info": info} for info in INFOS]
SOURCES = ["x", "x", "y", "x"]
# what is not 1 still marks a token
MASKS = [[1, 0, 2, 1], [1, 1, 1], [0, 0], [1]]
ADVANTAGES = [[0.5, 0.0, 0.5, 0.5], [1.0, 2.0, 3.0], [9.0, 9.0], [7.0]]


def jagged(rows):
    tensors = [torch.tensor(row) for row in rows]
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def stack(values):
    return NonTensorStack(*[NonTensorData(value) for value in values])


def objects(values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@pytest.fixture
def stored(monkeypatch):
    """TransferQueue in memory, which gives just the fields and rows that it is asked for."""
    fields = {"extra_fields": EXTRA, "data_source": SOURCES}
    tensors = {"response_mask": MASKS, "advantages": ADVANTAGES}

    def kv_batch_get(keys, partition_id, select_fields):
        assert (list(keys), partition_id) == (KEYS, "train")
        if {*select_fields} <= {*tensors}:
            columns = {name: jagged(tensors[name]) for name in select_fields}
            return TensorDict(columns, batch_size=len(KEYS))
        return {name: fields[name] for name in select_fields}

    monkeypatch.setattr(queue_rows.tq, "kv_batch_get", kv_batch_get)
    return fields


def meta():
    return KVBatchMeta(partition_id="train", keys=KEYS, tags=TAGS)


@pytest.mark.parametrize("kind", [list, stack, objects])
def test_rows_in_the_order_of_the_keys(stored, kind):
    stored.update({name: kind(values) for name, values in stored.items()})
    rows = queue_rows.fetch_rows(KEYS, "train", TAGS)
    assert [rows.info(row) for row in range(4)] == INFOS
    assert list(rows.sources) == SOURCES
    assert rows.is_padding_B.tolist() == [False, False, False, True]
    assert rows.label(2) == "v_0_0"


def test_a_row_without_rewards_or_tag(stored):
    stored["extra_fields"] = [{}, {"reward_extra_info": None}, *EXTRA[2:]]
    rows = queue_rows.fetch_rows(KEYS, "train", [{}] * 4)
    assert [rows.info(row) for row in range(2)] == [{}, {}]
    assert not rows.is_padding_B.any()


def test_lengths_come_from_tags_or_else_from_masks(stored):
    assert queue_rows.fetch_lengths(meta(), trained=False).tolist() == [4, 3, 2, 1]
    trained = queue_rows.fetch_lengths(meta(), trained=True)
    assert trained.tolist() == [3, 3, 0, 1]
    assert trained.dtype == np.int64


def test_columns_of_a_dump(stored):
    columns = queue_rows.fetch_dump_columns(meta())
    assert list(columns) == KEYS
    assert columns["u_1_0"] == {
        "group": "u",
        "session": 1,
        "data_source": "x",
        "response_tokens": 3,
        "rewards": {"a": None},
        "advantage": 2.0,
        "is_padding": False,
    }
    of = {name: [column[name] for column in columns.values()] for name in columns["u_0_0"]}
    assert of["group"] == ["u", "u", "v", "pad"]
    assert of["data_source"] == SOURCES
    assert of["response_tokens"] == [3, 3, 0, 1]
    # the mean over the tokens that are trained; 0 where none is
    assert of["advantage"] == [0.5, 2.0, 0.0, 7.0]
    assert of["rewards"][2] == {"a": 3.0, "b": 2.0}
    assert of["is_padding"] == [False, False, False, True]
