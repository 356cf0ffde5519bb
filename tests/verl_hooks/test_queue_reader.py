"""Reading rows from TransferQueue, which returns three kinds of columns."""

import numpy as np
import pytest
from tensordict.tensorclass import NonTensorData, NonTensorStack

from verl_gdpo.batch.rows import OWN_KEY
from verl_gdpo.verl_hooks import queue_reader

KEYS = ["u_0_0", "u_1_0", "v_0_0", "pad_0_0"]
TAGS = [{"response_len": n, "is_padding": n == 1} for n in (4, 3, 2, 1)]
INFOS = [
    {"a": 1.0, "score": 1.0},
    {"a": None, "score": 0.0},
    {"a": 3.0, "b": 2.0},  # no `score`: a manager of verl
    {"a": 1.0, "score": 1.0},
]
OWN = [{**info, OWN_KEY: 5.0} if row == 0 else info for row, info in enumerate(INFOS)]
EXTRA = [{"reward_extra_info": info} for info in OWN]
SOURCES = ["x", "x", "y", "x"]


def stack(values):
    return NonTensorStack(*[NonTensorData(value) for value in values])


def objects(values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@pytest.fixture
def stored(monkeypatch):
    """TransferQueue in memory: the fields of `KEYS`, of which it gives what is asked for."""
    fields = {"extra_fields": EXTRA, "data_source": SOURCES}

    def kv_batch_get(keys, partition_id, select_fields):
        assert partition_id == "train"
        rows = [KEYS.index(key) for key in keys]
        kind = fields.get("kind", list)
        return {name: kind([fields[name][row] for row in rows]) for name in select_fields}

    monkeypatch.setattr(queue_reader.tq, "kv_batch_get", kv_batch_get)
    return fields


@pytest.mark.parametrize("kind", [list, stack, objects])
def test_rows_in_the_order_of_the_keys(stored, kind):
    stored["kind"] = kind
    known = {}
    queue_reader.fetch_rows(KEYS[2:3], "train", TAGS[2:3], known)
    stored["data_source"] = ["x"] * 4  # what is known is not read again
    rows = queue_reader.fetch_rows(KEYS, "train", TAGS, known)
    assert list(known) == ["v_0_0", "u_0_0", "u_1_0", "pad_0_0"]
    assert [rows.info(row) for row in range(4)] == INFOS
    assert list(rows.sources) == SOURCES
    assert rows.own_scores == {0: 5.0}
    assert rows.is_padding_B.tolist() == [False, False, False, True]
    assert rows.label(2) == "v_0_0"


@pytest.mark.parametrize("short", [["data_source"], ["extra_fields", "data_source"]])
def test_an_answer_of_other_rows_is_an_error(monkeypatch, short):
    def kv_batch_get(keys, partition_id, select_fields):
        fields = {"extra_fields": EXTRA, "data_source": SOURCES}
        return {name: values[: 3 if name in short else 4] for name, values in fields.items()}

    monkeypatch.setattr(queue_reader.tq, "kv_batch_get", kv_batch_get)
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        queue_reader.fetch_rows(KEYS, "train", TAGS, {})


def test_a_row_without_rewards_or_tag(stored):
    stored["extra_fields"] = [{}, {"reward_extra_info": None}, *EXTRA[2:]]
    rows = queue_reader.fetch_rows(KEYS, "train", [{}] * 4, {})
    assert [rows.info(row) for row in range(2)] == [{}, {}]
    assert rows.own_scores == {}
    assert not rows.is_padding_B.any()
