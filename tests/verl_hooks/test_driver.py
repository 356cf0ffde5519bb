"""What is known of a run before verl starts Ray: the data sources of its rows."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from verl_gdpo.verl_hooks.driver import training_sources


def sources(files, **data):
    return training_sources(OmegaConf.create({"data": {"train_files": files, **data}}))


def test_files_say_their_data_sources(tmp_path):
    table, lines = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    pq.write_table(pa.table({"data_source": ["rlla", "mine", "rlla"], "x": [1, 2, 3]}), table)
    lines.write_text(json.dumps({"data_source": "other", "x": 1}) + "\n")
    assert sources(str(table)) == {"rlla", "mine"}
    assert sources([str(table), str(lines)]) == {"rlla", "mine", "other"}


def test_what_only_verl_can_read(tmp_path):
    without = tmp_path / "c.parquet"
    pq.write_table(pa.table({"x": [1]}), without)
    for files in (str(without), str(tmp_path / "none.parquet"), "hdfs://far/d.parquet", None, []):
        assert sources(files) is None
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"data_source": ["rlla"]}), table)
    assert sources(str(table), custom_cls={"path": "mine.py"}) is None
    assert training_sources(OmegaConf.create({})) is None
