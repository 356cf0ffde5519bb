"""The table of the keys that verl reads is the one that is made of the verl that is installed."""

import pytest
import verl

from verl_gdpo.hooks.verl_keys import KEYS, VERSION
from workshop import verl_keys
from workshop.verl_keys import MODULE, _add_source, keys_that_verl_reads, text_of


@pytest.mark.slow
@pytest.mark.skipif(verl.__version__ != VERSION, reason="it is the table of another version")
def test_the_table_is_up_to_date():
    assert MODULE.read_text() == text_of(keys_that_verl_reads()), "python -m workshop.verl_keys"


def test_each_way_to_read_a_key(monkeypatch):
    """Each of the keys a to m; n and o are read from something else."""
    source = """
class Dataset:
    def late(self):
        return self.options.l

    def __init__(self, config, data_config, model):
        data = config.data
        data.a, data["b"], data.get("c"), data.pop("d"), "e" in data
        getattr(self.config.data, "f", None), OmegaConf.select(config, "data.g")
        self.trainer.config.get("data").h
        data_config.get("i", {}).get("j")
        (config.get("data") or {}).get("k")
        self.options = config.data
        omega_conf_to_dataclass(config.data).m
        model.data.n, data.keys(), model.config.o
"""
    keys = {"": {"data"}, "data": set()}
    _add_source("trainer/some.py", source, keys)
    assert keys == {"": {"data"}, "data": set("abcdefghiklm")}
    # in this file of verl, the whole configuration is that of the data
    keys = {"": {"data"}, "data": set()}
    _add_source("utils/dataset/rl_dataset.py", "config.get('cache_dir')", keys)
    assert keys["data"] == {"cache_dir"}


def test_the_table_is_short_enough_to_be_read():
    assert all(len(line) <= verl_keys.WIDTH for line in KEYS.splitlines())
