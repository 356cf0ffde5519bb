"""Rows in little memory: they come back as they were, and few of them live at once."""

import gc
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from verl_gdpo.tasks.preparation import local_files, overlap, prepared_files
from verl_gdpo.tasks.preparation.local_files import PackedRows, PickedRows, items_of
from verl_gdpo.tools.data import main


def row(number):
    prompt = [{"role": "system", "content": "é" * 100}, {"role": "user", "content": f"{number} ∑"}]
    return {"prompt": prompt, "extra_info": {"index": number}, "text": ""}


def test_rows_come_back_as_they_were():
    rows = PackedRows()
    for number in range(5):
        rows.append(row(number))
    assert [*rows] == [row(number) for number in range(5)] and len(rows) == 5
    with pytest.raises(IndexError):
        rows[5]


def test_picked_rows_have_a_new_place_and_the_others_stay():
    rows = [row(number) for number in range(5)]
    picked = PickedRows(rows, np.array([3, 1]), "test")
    again = PickedRows(picked, np.array([1]), "train")
    expected = [
        {**row(n), "extra_info": {"index": i, "split": "test"}} for i, n in enumerate((3, 1))
    ]
    assert [*picked] == expected and len(picked) == 2
    assert [*again] == [{**row(1), "extra_info": {"index": 0, "split": "train"}}]
    assert rows == [row(number) for number in range(5)]


@pytest.mark.parametrize("source", ["jsonl", "synthetic"])
def test_a_row_more_takes_few_bytes(tmp_path, monkeypatch, source):
    """Python's own memory. As objects, a row took 3 kB."""
    monkeypatch.setattr(prepared_files, "ROWS_PER_GROUP", 64)
    monkeypatch.setattr(local_files, "ROWS_AT_ONCE", 64)
    monkeypatch.setattr(overlap, "MOST", 64)
    monkeypatch.setattr(overlap, "_words", overlap._words.__wrapped__)  # remembers 1,024 texts

    def peak(count):
        for name, rows in (("a", count), ("b", 10)):
            lines = (
                f'{{"question": "Is {n} a cup?", "answer": "#### {n}"}}\n' for n in range(rows)
            )
            (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        given = ["--synthetic", str(count), "--synthetic-test", "10"]
        if source == "jsonl":
            given = ["--from", str(tmp_path / "a.jsonl"), "--test", str(tmp_path / "b.jsonl")]
        gc.collect()
        tracemalloc.start()
        try:
            assert main(["gsm8k", "--out", str(tmp_path / "out"), "--force", *given]) == 0
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(100)  # what is imported and remembered once
    assert (peak(600) - peak(200)) / 400 < 300


def test_the_index_that_pandas_writes_is_no_field(tmp_path):
    """It stands in each file of filtered or shuffled rows. A named index is a field."""
    rows = [{"question": f"{number}?", "answer": f"#### {number}"} for number in range(3)]
    shuffled = pd.DataFrame(rows).iloc[[2, 0, 1]]
    shuffled.to_parquet(tmp_path / "rows.parquet")
    assert pq.read_schema(tmp_path / "rows.parquet").names[-1] == "__index_level_0__"
    assert [*items_of(tmp_path / "rows.parquet")] == [rows[2], rows[0], rows[1]]
    shuffled.rename_axis("id").to_parquet(tmp_path / "named.parquet")
    assert next(iter(items_of(tmp_path / "named.parquet"))) == {**rows[2], "id": 2}
